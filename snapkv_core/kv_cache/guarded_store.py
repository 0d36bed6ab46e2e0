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
    """Asks another store unless its circuit breaker is open; any thread may call.

    Deleting is always tried: what a tenant wants gone must not stay because of what other calls
    have met.
    """

    def __init__(self, store: KVStore, breaker: CircuitBreaker | None = None) -> None:
        """Guard a store, which `close` will close."""
        self.breaker = breaker or CircuitBreaker()
        self._store = store

    @property
    def name(self) -> str:
        """Name of the store behind it."""
        return self._store.name

    def get(self, namespace: str, key: str) -> bytes | None:
        """See `KVStore.get`; raises `StoreHeldBackError` while the breaker is open."""
        check_key(namespace, key)
        return self._guarded(lambda: self._store.get(namespace, key))

    def put(self, namespace: str, key: str, blob: bytes) -> None:
        """See `KVStore.put`; raises `StoreHeldBackError` while the breaker is open."""
        check_blob(namespace, key, blob)
        self._guarded(lambda: self._store.put(namespace, key, blob))

    def delete_namespace(self, namespace: str) -> int:
        """See `KVStore.delete_namespace`."""
        return self._store.delete_namespace(namespace)

    def close(self) -> None:
        """See `KVStore.close`."""
        self._store.close()

    def _guarded(self, call: Callable[[], _Result]) -> _Result:
        if not self.breaker.allows_call():
            raise StoreHeldBackError(self.name)
        try:
            result = call()
        except StoreError:
            self.breaker.note_failure()
            raise
        self.breaker.note_success()
        return result
