"""Writes snapshots behind the answers: one at a time, at a bounded pace, on a thread of its own."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from snapkv_core.errors import StoreError
from snapkv_core.kv_cache.circuit_breaker import CircuitBreaker
from snapkv_core.kv_cache.snapshot import PromptSnapshot, SnapshotBody, SnapshotIdentity
from snapkv_core.kv_cache.snapshot_codec import encode_snapshot
from snapkv_core.kv_cache.store import KVStore

WriteOutcome = Literal["stored", "failed", "dropped"]
#: Told of each snapshot: what became of it, seconds, and the bytes that were sent.
OnWrite = Callable[[WriteOutcome, float, int], None]

#: How long a write that runs is waited for at the end of the process.
_CLOSE_TIMEOUT_S: Final = 2.0

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Job:
    namespace: str
    identity: SnapshotIdentity
    snapshot: PromptSnapshot


class SnapshotWriter:
    """Encodes snapshots and puts them into a store; any thread may give it one.

    What is given up: a snapshot that finds too many bytes waiting, those that wait while the store
    fails, and those that are not written when it is closed.
    """

    def __init__(
        self,
        store: KVStore,
        on_write: OnWrite,
        *,
        body: SnapshotBody,
        max_bytes_per_s: float,
        max_pending_bytes: int,
    ) -> None:
        """Start the thread.

        Args:
            store: Takes the bytes; not closed here.
            on_write: Told of each snapshot, on any thread.
            body: How K and V are written.
            max_bytes_per_s: Pace, on average over one snapshot and the pause after it.
            max_pending_bytes: Bytes of K and V that may wait or be written.
        """
        self._store = store
        # Of its own: a store that is full still has what it holds.
        self._breaker = CircuitBreaker()
        self._on_write = on_write
        self._body = body
        self._max_bytes_per_s = max_bytes_per_s
        self._max_pending_bytes = max_pending_bytes
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_pending_bytes = 0  # under the lock
        self._is_closing = threading.Event()
        # A daemon: a store that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="snapshot-writer", daemon=True)
        self._thread.start()

    @property
    def num_pending_bytes(self) -> int:
        """Bytes of K and V that wait or are being written."""
        return self._num_pending_bytes

    @property
    def is_held_back(self) -> bool:
        """Whether a snapshot would be dropped, since writes fail."""
        return self._breaker.is_holding_back

    def write(self, namespace: str, identity: SnapshotIdentity, snapshot: PromptSnapshot) -> None:
        """Take a snapshot and return at once."""
        num_bytes = snapshot.num_bytes
        with self._lock:
            has_room = self._num_pending_bytes + num_bytes <= self._max_pending_bytes
            if has_room and not self._is_closing.is_set():
                self._num_pending_bytes += num_bytes
                self._jobs.put(_Job(namespace, identity, snapshot))
                return
        self._on_write("dropped", 0.0, 0)

    def close(self) -> None:
        """Give up what waits; blocks for as long as a running write is waited for."""
        with self._lock:
            self._is_closing.set()
            self._jobs.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while (pause_s := self._run_next()) is not None:
            self._is_closing.wait(pause_s)

    def _run_next(self) -> float | None:
        """Wait for a snapshot and write it; holds none of it when it returns.

        Returns:
            What is left of the seconds that so many bytes may take; None at the end.
        """
        job = self._jobs.get()
        if job is None:
            return None
        pause_s = 0.0
        if self._is_closing.is_set() or not self._breaker.allows_call():
            self._on_write("dropped", 0.0, 0)
        else:
            pause_s = self._write(job)
        with self._lock:
            self._num_pending_bytes -= job.snapshot.num_bytes
        return pause_s

    def _write(self, job: _Job) -> float:
        start_s = time.monotonic()
        outcome: WriteOutcome = "failed"
        num_bytes = 0
        try:
            blob = encode_snapshot(job.snapshot, job.identity, body=self._body)
            num_bytes = len(blob)
            self._store.put(job.namespace, job.identity.key(), blob)
            outcome = "stored"
            self._breaker.note_success()
        except StoreError as error:
            self._breaker.note_failure()
            # As text: who keeps the record would keep the error, and with it the snapshot.
            _logger.warning("storing a snapshot failed: %s", str(error))
        except Exception:
            _logger.exception("storing a snapshot failed")
        seconds = time.monotonic() - start_s
        self._on_write(outcome, seconds, num_bytes)
        return max(0.0, num_bytes / self._max_bytes_per_s - seconds)
