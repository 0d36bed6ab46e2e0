"""Decides which requests are traced when their caller did not."""

import random
import time
from collections.abc import Callable


class LocalSampler:
    """The first requests of each second, and a share of the further ones.

    The rule of X-Ray's local sampling: no service is asked. Used on the event loop only.
    """

    def __init__(
        self,
        reservoir_per_s: int,
        rate: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """Trace `reservoir_per_s` requests each second and `rate` of the rest, 0 to 1.

        Args:
            reservoir_per_s: Requests traced each second whatever the rate.
            rate: Share of the rest.
            clock: Seconds, never going back.
            draw: Even numbers from 0 to below 1.
        """
        self._reservoir_per_s = reservoir_per_s
        self._rate = rate
        self._clock = clock
        self._draw = draw
        self._second = int(clock())
        self._num_taken = 0

    def take(self) -> bool:
        """Decide for one request."""
        second = int(self._clock())
        if second != self._second:
            self._second, self._num_taken = second, 0
        if self._num_taken < self._reservoir_per_s:
            self._num_taken += 1
            return True
        return self._draw() < self._rate
