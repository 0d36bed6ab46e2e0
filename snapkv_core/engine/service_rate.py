"""How often a request ends, measured: what a caller who found the queue full should wait."""

from typing import Final

_WEIGHT: Final = 0.2
_MIN_RETRY_S: Final = 1.0
_MAX_RETRY_S: Final = 120.0


class ServiceRate:
    """Running mean of the time between two ends of requests while the engine is busy.

    Each end frees a place in the queue, so this is how long the next place takes. Written by the
    engine thread; `retry_after_s` may be read by any.
    """

    def __init__(self) -> None:
        self._mean_s: float | None = None
        self._since_s: float | None = None

    def note_busy(self, now_s: float) -> None:
        """The engine has work; counts from the first call after `note_idle`."""
        if self._since_s is None:
            self._since_s = now_s

    def note_idle(self) -> None:
        """The engine has none: the time until the next end says nothing about its speed."""
        self._since_s = None

    def note_end(self, now_s: float) -> None:
        """A request has ended, for whatever reason."""
        if self._since_s is None:
            return
        interval_s, self._since_s = now_s - self._since_s, now_s
        if self._mean_s is None:
            self._mean_s = interval_s
        else:
            self._mean_s += _WEIGHT * (interval_s - self._mean_s)

    def retry_after_s(self) -> float:
        """Return the seconds until a place is likely to be free, from 1 to 120."""
        return min(max(self._mean_s or _MIN_RETRY_S, _MIN_RETRY_S), _MAX_RETRY_S)
