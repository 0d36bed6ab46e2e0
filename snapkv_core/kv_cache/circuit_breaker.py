"""Keeps a store that fails from costing every request its time."""

import threading
import time
from collections.abc import Callable


class CircuitBreaker:
    """Closed until some calls in a row fail; then open for a while, but for one probe at its end.

    Any thread may use it.
    """

    def __init__(
        self,
        *,
        max_failures: int = 3,
        open_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start closed.

        Args:
            max_failures: Failures in a row that open it.
            open_s: Seconds until a call is let through to see whether the store is back.
            clock: Returns seconds.
        """
        self._max_failures = max_failures
        self._open_s = open_s
        self._clock = clock
        self._lock = threading.Lock()
        self._num_failures = 0
        self._probe_at_s = 0.0

    @property
    def is_open(self) -> bool:
        """Whether calls are held back, but for one now and then."""
        return self._num_failures >= self._max_failures

    @property
    def is_holding_back(self) -> bool:
        """Whether the next call would be held back."""
        return self.is_open and self._clock() < self._probe_at_s

    def allows_call(self) -> bool:
        """Ask before each call; of those that come while it is open, one in `open_s` may go."""
        with self._lock:
            if not self.is_open:
                return True
            now_s = self._clock()
            if now_s < self._probe_at_s:
                return False
            self._probe_at_s = now_s + self._open_s
            return True

    def note_success(self) -> None:
        """Close it."""
        with self._lock:
            self._num_failures = 0

    def note_failure(self) -> None:
        """Count a call that failed or took too long."""
        with self._lock:
            self._num_failures += 1
            if self.is_open:
                self._probe_at_s = self._clock() + self._open_s
