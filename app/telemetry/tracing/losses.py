"""Counts what never reached a collector of traces, and says so, but not for every piece."""

import threading
import time
from collections.abc import Callable
from typing import Final

import structlog

TRACES_LOST: Final = "traces_lost"
REPORT_INTERVAL_S: Final = 60.0

_log = structlog.get_logger("snapkv.tracing")


class LossCount:
    """Losses of one exporter; any thread may add to it.

    The first loss is logged at once, what follows at most once a minute. A reason is a short word
    of ours or an exception's type: messages may quote addresses with keys in them.
    """

    def __init__(self, tracing: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Count for the exporter called `tracing`."""
        self.num_lost = 0
        self._tracing = tracing
        self._clock = clock
        self._lock = threading.Lock()
        self._num_unsaid = 0
        self._reason = ""
        self._next_report_s = clock()

    def add(self, num: int, reason: str) -> None:
        """Note that `num` segments or spans were lost."""
        with self._lock:
            self.num_lost += num
            self._num_unsaid += num
            self._reason = reason
            is_due = self._clock() >= self._next_report_s
        if is_due:
            self.report()

    def report(self) -> None:
        """Log what was lost since the last report, if anything was."""
        with self._lock:
            num, self._num_unsaid = self._num_unsaid, 0
            self._next_report_s = self._clock() + REPORT_INTERVAL_S
            reason = self._reason
        if num:
            _log.warning(TRACES_LOST, tracing=self._tracing, num_lost=num, reason=reason)
