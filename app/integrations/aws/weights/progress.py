"""How far a transfer is: counted by the threads that do it, told by the one that waits."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import structlog

from app.integrations.aws.weights.errors import WeightsError

_log = structlog.get_logger("snapkv.weights")

_LOG_INTERVAL_S: Final = 5.0
#: Less than this within the time limit is a line that hangs, however faintly it still moves.
_LEAST_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class TransferProgress:
    """What has been transferred so far.

    Attributes:
        total_bytes: Bytes of all files.
        done_bytes: Bytes of them that are here, those of an earlier attempt counted in.
        received_bytes: Bytes that came over the network, those that had to come twice counted
            twice.
        elapsed_s: Time since the transfer began.
    """

    total_bytes: int
    done_bytes: int
    received_bytes: int
    elapsed_s: float


ProgressCallback = Callable[[TransferProgress], None]


class Tally:
    """Counts what several threads transfer."""

    def __init__(self, total_bytes: int) -> None:
        self._guard = threading.Lock()
        self._total_bytes = total_bytes
        self._started_s = time.monotonic()
        self._done_bytes = 0
        self._received_bytes = 0
        self._activity = 0
        self._num_waiting = 0

    def count_received(self, num_bytes: int) -> None:
        """Count bytes that came over the network."""
        with self._guard:
            self._done_bytes += num_bytes
            self._received_bytes += num_bytes
            self._activity += num_bytes

    def count_found(self, num_bytes: int) -> None:
        """Count bytes that an earlier attempt left; negative for bytes that prove useless."""
        with self._guard:
            self._done_bytes += num_bytes

    def count_answer(self) -> None:
        """Count an answer without a body."""
        with self._guard:
            self._activity += _LEAST_BYTES

    @contextmanager
    def waiting_for_s3(self) -> Iterator[None]:
        """Mark the time in which nothing but S3 can make a thread go on."""
        with self._guard:
            self._num_waiting += 1
        try:
            yield
        finally:
            with self._guard:
                self._num_waiting -= 1

    def activity(self) -> tuple[int, bool]:
        """Return how much S3 has sent, and whether anything is expected from it."""
        with self._guard:
            return self._activity, self._num_waiting > 0

    def snapshot(self) -> TransferProgress:
        """Return the counts of one moment."""
        with self._guard:
            return TransferProgress(
                total_bytes=self._total_bytes,
                done_bytes=self._done_bytes,
                received_bytes=self._received_bytes,
                elapsed_s=time.monotonic() - self._started_s,
            )


class StallWatch:
    """Ends a transfer that S3 keeps waiting.

    A timeout of a socket ends a silence; a server that sends a byte now and then is never silent.
    """

    def __init__(self, tally: Tally, timeout_s: float, source: str) -> None:
        self._tally = tally
        self._timeout_s = timeout_s
        self._source = source
        self._mark = 0
        self._marked_s = time.monotonic()

    def check(self) -> None:
        """Look at the clock; called every now and then.

        Raises:
            WeightsError: Next to nothing came for too long.
        """
        activity, is_waiting = self._tally.activity()
        now_s = time.monotonic()
        if not is_waiting or activity - self._mark >= _LEAST_BYTES:
            self._mark, self._marked_s = activity, now_s
        elif now_s - self._marked_s > self._timeout_s:
            raise WeightsError(
                f"{self._source}: S3 sent {activity - self._mark:,} bytes in "
                f"{self._timeout_s:g} s; the download was given up"
            )


class ProgressLog:
    """Logs a line every few seconds, for runs without a terminal."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._due_s = time.monotonic() + _LOG_INTERVAL_S

    def on_progress(self, progress: TransferProgress) -> None:
        """Log unless the last line was a moment ago."""
        now_s = time.monotonic()
        if now_s < self._due_s:
            return
        self._due_s = now_s + _LOG_INTERVAL_S
        _log.info(
            "weights_download_progress",
            source=self._source,
            done_bytes=progress.done_bytes,
            total_bytes=progress.total_bytes,
            bytes_per_s=round(progress.received_bytes / max(progress.elapsed_s, 1e-9)),
        )
