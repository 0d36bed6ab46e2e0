"""Writes one DynamoDB item per generation, on a thread of its own and without ever waiting for it.

It knows no metric: whoever makes it is told how many items were written, dropped or refused.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import structlog

from app.integrations.aws.batch_writer import MAX_BATCH_ITEMS, BatchResult, BatchWriter
from app.integrations.aws.clients import aws_client
from app.integrations.aws.request_item import REQUEST_LOG_TABLE, Item, item_of
from app.losses import LossCount
from app.records import GenerationRecord
from app.setting_groups.aws import AwsSettings

#: Items that wait while DynamoDB does not answer, some two KB each.
MAX_QUEUED_ITEMS: Final = 5_000
#: An item waits no longer for others to be written with.
MAX_ITEM_AGE_S: Final = 1.0
#: What the end of the process waits for items that are left.
FLUSH_TIMEOUT_S: Final = 5.0

WRITTEN: Final = "written"
DROPPED: Final = "dropped"
FAILED: Final = "failed"

#: Told of an outcome and of how many items had it, on any thread.
CountItems = Callable[[str, int], None]

_log = structlog.get_logger("snapkv.request_log")


def open_request_log(settings: AwsSettings, count_items: CountItems) -> "RequestLog | None":
    """Return the request log that the settings ask for, not started; None when they do not.

    Raises:
        SettingsError: The SDK's configuration is incomplete.
    """
    if settings.request_log_table is None:
        return None
    # Attempts are repeated by the batch writer, which alone knows when there is no more time.
    client = aws_client("dynamodb", max_attempts=1)
    return RequestLog(
        client,
        settings.request_log_table,
        ttl_days=settings.request_log_ttl_days,
        count_items=count_items,
    )


class RequestLog:
    """The record sink that writes a table.

    `on_generation` only queues; one daemon thread takes items in batches. `_changed` guards all
    that both touch. Each item is counted once: as it is written or refused, or when it is given up.
    """

    def __init__(
        self,
        client: Any,
        table: str,
        *,
        ttl_days: int,
        count_items: CountItems,
        max_queued: int = MAX_QUEUED_ITEMS,
    ) -> None:
        """Write to `table` through an SDK's client.

        Args:
            client: DynamoDB client that does not repeat attempts itself.
            table: Name of the table.
            ttl_days: Days after which an item expires.
            count_items: Told of what became of items.
            max_queued: Items that may wait; more are dropped.
        """
        self._writer = BatchWriter(client, table)
        self._ttl_days = ttl_days
        self._count_items = count_items
        self._max_queued = max_queued
        self._changed = threading.Condition()
        self._queue: deque[tuple[float, Item]] = deque()
        self._num_writing = 0
        self._give_up_at_s: float | None = None
        self._losses = LossCount(_log_lost)
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin writing."""
        self._thread = threading.Thread(target=self._run, name="snapkv-request-log", daemon=True)
        self._thread.start()

    def on_generation(self, record: GenerationRecord) -> None:
        """See `RecordSink.on_generation`."""
        item = item_of(record, self._ttl_days)
        with self._changed:
            is_closing = self._give_up_at_s is not None
            if not is_closing and len(self._queue) < self._max_queued:
                self._queue.append((time.monotonic(), item))
                self._changed.notify()
                return
        self._lose(DROPPED, 1, "closed" if is_closing else "queue_full")

    def close(self, timeout_s: float) -> None:
        """Write what is left, for at most so many seconds; blocking, harmless when called twice.

        What cannot be written by then is dropped and counted.
        """
        with self._changed:
            if self._give_up_at_s is not None:
                return
            self._give_up_at_s = time.monotonic() + timeout_s
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)
        with self._changed:
            # The batch that is being written may arrive yet, but nobody will know.
            num_left = len(self._queue) + self._num_writing
            self._queue.clear()
            self._num_writing = 0
        self._lose(DROPPED, num_left, "no_time_left")
        self._losses.report()

    def _run(self) -> None:
        while batch := self._next_batch():
            result = self._writer.write(batch, self._pause)
            with self._changed:
                is_abandoned = self._num_writing == 0
                self._num_writing = 0
            if not is_abandoned:
                self._count(result)

    def _next_batch(self) -> list[Item]:
        """Wait for a batch that is full or old enough; an empty one is the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._give_up_at_s is not None)
            if self._queue:
                age_s = time.monotonic() - self._queue[0][0]
                self._changed.wait_for(
                    lambda: len(self._queue) >= MAX_BATCH_ITEMS or self._give_up_at_s is not None,
                    MAX_ITEM_AGE_S - age_s,
                )
            batch: dict[tuple[object, object], Item] = {}
            while self._queue and len(batch) < MAX_BATCH_ITEMS:
                _, item = self._queue[0]
                key = (item[REQUEST_LOG_TABLE.hash_key], item[REQUEST_LOG_TABLE.range_key])
                # DynamoDB refuses a batch that holds a key twice; the next one may overwrite it.
                if key in batch:
                    break
                batch[key] = item
                self._queue.popleft()
            self._num_writing = len(batch)
            return list(batch.values())

    def _pause(self, seconds: float) -> bool:
        with self._changed:
            if self._give_up_at_s is None:
                # Closing cuts the pause short, and the next attempt comes at once.
                self._changed.wait_for(lambda: self._give_up_at_s is not None, seconds)
                return True
            left_s = self._give_up_at_s - time.monotonic()
        if left_s <= 0:
            return False
        # Half of what is left at most, so that there is time for the attempt after it.
        time.sleep(min(seconds, left_s / 2))
        return True

    def _count(self, result: BatchResult) -> None:
        if result.num_written:
            self._count_items(WRITTEN, result.num_written)
        self._lose(DROPPED, result.num_dropped, result.reason)
        self._lose(FAILED, result.num_failed, result.reason)

    def _lose(self, outcome: str, num: int, reason: str | None) -> None:
        if num:
            self._count_items(outcome, num)
        self._losses.add(num, reason or "")


def _log_lost(num: int, reason: str) -> None:
    _log.warning("request_log_items_lost", num_items=num, reason=reason)
