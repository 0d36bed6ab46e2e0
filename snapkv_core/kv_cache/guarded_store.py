"""A store that is left alone for a while once it has failed several times in a row."""

from collections.abc import Callable
from typing import TypeVar

from snapkv_core.errors import StoreError
from snapkv_core.kv_cache.circuit_breaker import CircuitBreaker
from snapkv_core.kv_cache.store import KVStore, check_blob, check_key

_Result = TypeVar("_Result")


class StoreHeldBackError(StoreError):
    """A store was not asked, since it has been failing."""

    def __init__(self, store: str) -> None:
        super().__init__(store, "it failed several times in a row and is left alone for a while")


class GuardedStore:
    """Asks another store unless a circuit breaker is open; any thread may call.

    Reads and writes have one each: a store that is full still has what it holds. Deleting is
    always tried: what a tenant wants gone must not stay because of what other calls have met.

    Attributes:
        read_breaker: That of `get`.
        write_breaker: That of `put`.
    """

    def __init__(
        self, store: KVStore, new_breaker: Callable[[], CircuitBreaker] = CircuitBreaker
    ) -> None:
        """Guard a store, which `close` will close."""
        self.read_breaker, self.write_breaker = new_breaker(), new_breaker()
        self._store = store

    @property
    def name(self) -> str:
        """Name of the store behind it."""
        return self._store.name

    def get(self, namespace: str, key: str) -> bytes | None:
        """See `KVStore.get`; raises `StoreHeldBackError` while the breaker is open."""
        check_key(namespace, key)
        return self._guarded(self.read_breaker, lambda: self._store.get(namespace, key))

    def put(self, namespace: str, key: str, blob: bytes) -> None:
        """See `KVStore.put`; raises `StoreHeldBackError` while the breaker is open."""
        check_blob(namespace, key, blob)
        self._guarded(self.write_breaker, lambda: self._store.put(namespace, key, blob))

    def delete_namespace(self, namespace: str) -> int:
        """See `KVStore.delete_namespace`."""
        return self._store.delete_namespace(namespace)

    def close(self) -> None:
        """See `KVStore.close`."""
        self._store.close()

    def _guarded(self, breaker: CircuitBreaker, call: Callable[[], _Result]) -> _Result:
        if not breaker.allows_call():
            raise StoreHeldBackError(self.name)
        try:
            result = call()
        except StoreError:
            breaker.note_failure()
            raise
        breaker.note_success()
        return result
