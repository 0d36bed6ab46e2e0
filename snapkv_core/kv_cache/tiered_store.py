"""Several stores as one: the nearest that has a blob answers, and those before it get a copy.

It knows only the `KVStore` protocol; one store's failure is told and hides no other store.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Final

from snapkv_core.errors import InvalidParameterError, StoreError
from snapkv_core.kv_cache.guarded_store import StoreHeldBackError
from snapkv_core.kv_cache.store import KVStore, MemoryStore, check_blob, check_key

#: Copies that may wait or run at once; each holds a blob of up to hundreds of megabytes.
MAX_PENDING_COPIES: Final = 2

#: Told which store failed and how, on any thread.
OnStoreError = Callable[[str, StoreError], None]


class TieredStore:
    """Asks stores in order, nearest first; any thread may call.

    A blob found further away is copied to the nearer stores that did not have it: into memory
    before `get` returns, to others on an executor, and not at all while too many copies wait.
    No copy made by `get` outlives a deletion of its namespace in this process.
    """

    name: Final = "tiered"

    def __init__(
        self,
        stores: Sequence[KVStore],
        *,
        executor: Executor,
        on_error: OnStoreError,
        max_pending_copies: int = MAX_PENDING_COPIES,
    ) -> None:
        """Combine stores and an executor, which `close` will end.

        Args:
            stores: The stores, nearest first.
            executor: Runs copies to stores that are not memory.
            on_error: Told of each failure of a store.
            max_pending_copies: Copies that may wait or run at once; others are not made.

        Raises:
            InvalidParameterError: There is no store.
        """
        if not stores:
            raise InvalidParameterError("stores", "must be at least one")
        self._stores = tuple(stores)
        self._executor = executor
        self._on_error = on_error
        self._places = threading.Semaphore(max_pending_copies)
        self._copies = _Copies()

    def get(self, namespace: str, key: str) -> bytes | None:
        """See `KVStore.get`; fails only where all stores do."""
        check_key(namespace, key)
        epoch = self._copies.epoch_of(namespace)
        without: list[KVStore] = []
        failures: list[StoreError] = []
        for store in self._stores:
            try:
                blob = store.get(namespace, key)
            except StoreError as error:
                self._on_error(store.name, error)
                failures.append(error)
                continue
            if blob is not None:
                for nearer in without:
                    self._copy(nearer, namespace, key, blob, epoch)
                return blob
            without.append(store)
        if len(failures) == len(self._stores):
            raise self._failure(failures, "no store answered")
        return None

    def put(self, namespace: str, key: str, blob: bytes) -> None:
        """See `KVStore.put`; puts into all stores, one after the other, fails only where all do."""
        check_blob(namespace, key, blob)
        failures: list[StoreError] = []
        for store in self._stores:
            try:
                store.put(namespace, key, blob)
            except StoreError as error:
                self._on_error(store.name, error)
                failures.append(error)
        if len(failures) == len(self._stores):
            raise self._failure(failures, "no store took the blob")

    def delete_namespace(self, namespace: str) -> int:
        """See `KVStore.delete_namespace`; tries all stores and fails if any did.

        The furthest comes first: what is gone there cannot come back into a nearer one, not even
        in other processes.

        Returns:
            Blobs removed; one that two stores held counts twice.
        """
        num_removed = 0
        failed: list[str] = []
        with self._copies.stopped(namespace):
            for store in reversed(self._stores):
                try:
                    num_removed += store.delete_namespace(namespace)
                except StoreError as error:
                    self._on_error(store.name, error)
                    failed.append(store.name)
        if failed:
            raise StoreError(self.name, f"blobs may be left in {', '.join(failed)}")
        return num_removed

    def close(self) -> None:
        """See `KVStore.close`; copies that have not begun are given up."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        for store in self._stores:
            store.close()

    def _failure(self, failures: Sequence[StoreError], reason: str) -> StoreError:
        if all(isinstance(error, StoreHeldBackError) for error in failures):
            return StoreHeldBackError(self.name)
        return StoreError(self.name, reason)

    def _copy(self, store: KVStore, namespace: str, key: str, blob: bytes, epoch: int) -> None:
        def copy() -> None:
            with self._copies.running(namespace, epoch) as is_allowed:
                if is_allowed:
                    store.put(namespace, key, blob)

        def copy_later() -> None:
            try:
                copy()
            except StoreError as error:
                self._on_error(store.name, error)
            finally:
                self._places.release()

        if isinstance(store, MemoryStore):
            copy()
        elif self._places.acquire(blocking=False):
            try:
                self._executor.submit(copy_later)
            except RuntimeError:  # the process ends: the executor takes nothing any more
                self._places.release()


class _Copies:
    """Tells whether a copy may still be made; `_changed` guards all of it.

    A copy belongs to the epoch of its namespace in which it was read. A deletion waits for copies
    that run, allows none while it runs, and ends the epoch of those that have not begun.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._epochs: Counter[str] = Counter()
        self._num_running: Counter[str] = Counter()
        self._num_deletions: Counter[str] = Counter()

    def epoch_of(self, namespace: str) -> int:
        """Return what a copy that is about to be read has to show before it is made."""
        with self._changed:
            return self._epochs[namespace]

    @contextmanager
    def running(self, namespace: str, epoch: int) -> Iterator[bool]:
        """Make a copy within the block, if it yields true."""
        with self._changed:
            is_allowed = not self._num_deletions[namespace] and self._epochs[namespace] == epoch
            self._num_running[namespace] += is_allowed
        try:
            yield is_allowed
        finally:
            with self._changed:
                self._num_running[namespace] -= is_allowed
                self._changed.notify_all()

    @contextmanager
    def stopped(self, namespace: str) -> Iterator[None]:
        """Delete within the block."""
        with self._changed:
            self._num_deletions[namespace] += 1
            # Not for ever: each call of a store ends in bounded time.
            self._changed.wait_for(lambda: not self._num_running[namespace])
        try:
            yield
        finally:
            with self._changed:
                self._epochs[namespace] += 1
                self._num_deletions[namespace] -= 1
