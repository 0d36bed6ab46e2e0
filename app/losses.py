"""Counts what could not be delivered to another system, and says so, but not for every piece."""

import threading
import time
from collections.abc import Callable
from typing import Final

REPORT_INTERVAL_S: Final = 60.0


class LossCount:
    """Losses of one kind; any thread may add to it.

    The first loss is said at once, what follows at most once a minute. A reason is a short word of
    ours or an exception's type: messages may quote addresses with keys in them.
    """

    def __init__(
        self,
        say: Callable[[int, str], None],
        count: Callable[[int], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Keep count of what is lost.

        Args:
            say: Told how many were lost since it was last called, and why the last one was.
            count: Told of each loss at once.
            clock: Returns seconds.
        """
        self.num_lost = 0
        self._say = say
        self._count = count
        self._clock = clock
        self._lock = threading.Lock()
        self._num_unsaid = 0
        self._reason = ""
        self._next_report_s = clock()

    def add(self, num: int, reason: str) -> None:
        """Note that so many were lost; none still lets earlier losses be said."""
        with self._lock:
            if num:
                self.num_lost += num
                self._num_unsaid += num
                self._reason = reason
            is_due = self._num_unsaid > 0 and self._clock() >= self._next_report_s
        if num and self._count is not None:
            self._count(num)
        if is_due:
            self.report()

    def report(self) -> None:
        """Say what was lost since the last report, if anything was."""
        with self._lock:
            num, self._num_unsaid = self._num_unsaid, 0
            reason = self._reason
            if num:
                self._next_report_s = self._clock() + REPORT_INTERVAL_S
        if num:
            self._say(num, reason)
