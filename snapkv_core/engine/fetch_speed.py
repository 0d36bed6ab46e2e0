"""How long fetching from a store takes, from what earlier fetches took."""

import time
from collections.abc import Callable
from typing import Final

#: Weight of a new observation: old ones fade within about ten.
_WEIGHT: Final = 0.25
#: An estimate that keeps anybody from fetching is never corrected, so it does not hold for long.
_MAX_AGE_S: Final = 60.0


class FetchSpeed:
    """Running estimates of a store's round trip and of its bytes per second.

    Used on the event loop only.

    Attributes:
        round_trip_s: Seconds until the store says that it holds nothing; None before the first.
        bytes_per_s: Pace at which snapshots come and are decoded; None before the first.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.round_trip_s: float | None = None
        self.bytes_per_s: float | None = None
        self._clock = clock
        self._observed_at_s = clock()

    def observe_miss(self, seconds: float) -> None:
        """Learn from a lookup that found nothing."""
        self.round_trip_s = self._moved(self.round_trip_s, seconds)
        self._observed_at_s = self._clock()

    def observe_hit(self, num_bytes: int, seconds: float) -> None:
        """Learn from a snapshot that came."""
        self.bytes_per_s = self._moved(self.bytes_per_s, num_bytes / max(seconds, 1e-6))
        self._observed_at_s = self._clock()

    def expected_s(self, num_bytes: int) -> float:
        """Return the seconds that fetching so many bytes should take.

        0 while nothing is known, or when what is known is older than a minute.
        """
        if self._is_old:
            return 0.0
        transfer_s = 0.0 if self.bytes_per_s is None else num_bytes / self.bytes_per_s
        return (self.round_trip_s or 0.0) + transfer_s

    @property
    def _is_old(self) -> bool:
        return self._clock() - self._observed_at_s > _MAX_AGE_S

    def _moved(self, estimate: float | None, observed: float) -> float:
        # What is forgotten has no weight: one slow answer must not keep everybody away for long.
        if estimate is None or self._is_old:
            return observed
        return estimate + _WEIGHT * (observed - estimate)
