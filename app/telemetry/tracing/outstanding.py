"""Keeps count of what a sender has taken and not sent yet, so that no loss goes unnoticed."""

import threading

from app.losses import LossCount


class Outstanding:
    """Pieces between their taking and their sending; any thread may use it.

    Each piece that is taken ends once: sent, lost, or given up at the end.
    """

    def __init__(self, losses: LossCount, limit: int | None = None) -> None:
        """Count into `losses`.

        Args:
            losses: Told of every piece that is lost.
            limit: Pieces that whatever holds them can hold; what goes beyond it was dropped there
                without a word. None: it says itself what it drops.
        """
        self._losses = losses
        self._limit = limit
        self._lock = threading.Lock()
        self._num = 0
        self._takes_more = True
        self._is_over = False

    @property
    def is_over(self) -> bool:
        """Whether what was not sent has been given up."""
        return self._is_over

    def take(self) -> bool:
        """Note one more piece; False means that it comes too late, and is lost."""
        num_dropped = 0
        with self._lock:
            is_taken = self._takes_more
            if is_taken:
                self._num += 1
                if self._limit is not None and self._num > self._limit:
                    num_dropped, self._num = self._num - self._limit, self._limit
        self._losses.add(num_dropped, "queue_full")
        if not is_taken:
            self._losses.add(1, "closed")
        return is_taken

    def settle(self, num: int, lost_because: str | None = None) -> None:
        """Note that so many pieces were sent, or are lost for a reason."""
        with self._lock:
            if self._is_over:
                # They were counted as lost already.
                return
            self._num -= num
        if lost_because is not None:
            self._losses.add(num, lost_because)

    def stop_taking(self) -> None:
        """Take nothing more; what was taken may still be sent."""
        with self._lock:
            self._takes_more = False

    def give_up(self) -> None:
        """Count whatever was not sent by now as lost, and say so."""
        with self._lock:
            self._takes_more = False
            self._is_over = True
            num, self._num = self._num, 0
        self._losses.add(num, "not_sent_at_close")
        self._losses.report()
