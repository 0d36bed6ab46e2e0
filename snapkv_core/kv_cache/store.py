"""Where encoded snapshots are kept: bytes under a namespace and a key, and the store in memory.

It knows no model and no snapshot format. Stores over a network live in the application.
"""

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from snapkv_core.errors import InvalidParameterError
from snapkv_core.validation import require_int, require_number

_NAMESPACE: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_KEY: Final = re.compile(r"[0-9a-f]{64}")
_MAX_BYTES: Final = 1 << 50


class KVStore(Protocol):
    """Keeps blobs; any thread may call, and every call ends in bounded time.

    A namespace is a tenant's opaque id, 1 to 64 of `A-Z a-z 0-9 _ -`; a key is 64 lower-case hex
    digits. A blob is whole or not there: a writer that dies leaves nothing that `get` returns.
    """

    @property
    def name(self) -> str:
        """Short name for metrics, such as `memory`."""
        ...

    def get(self, namespace: str, key: str) -> bytes | None:
        """Return a blob as it was put; None when it, or a part of it, is not there any more.

        Raises:
            InvalidParameterError: Namespace or key has another form.
            StoreError: The store cannot say.
        """
        ...

    def put(self, namespace: str, key: str, blob: bytes) -> None:
        """Keep a blob in place of any that is there; stores drop what they have no room for.

        Raises:
            InvalidParameterError: Namespace or key has another form, or the blob is empty.
            StoreError: The blob was not taken, and what was there before may be gone.
        """
        ...

    def delete_namespace(self, namespace: str) -> int:
        """Remove all blobs of a namespace that are there as the call begins.

        Returns:
            Blobs removed.

        Raises:
            InvalidParameterError: The namespace has another form.
            StoreError: Some of them may be left.
        """
        ...

    def close(self) -> None:
        """Give connections and memory back; the store is not used afterwards."""
        ...


def check_namespace(namespace: str) -> None:
    """Raise `InvalidParameterError` unless this may be a namespace."""
    if not _NAMESPACE.fullmatch(namespace):
        raise InvalidParameterError("namespace", "must be 1 to 64 characters of A-Z a-z 0-9 _ -")


def check_key(namespace: str, key: str) -> None:
    """Raise `InvalidParameterError` unless these may be a namespace and a key."""
    check_namespace(namespace)
    if not _KEY.fullmatch(key):
        raise InvalidParameterError("key", "must be 64 lower-case hex digits")


def check_blob(namespace: str, key: str, blob: bytes) -> None:
    """Raise `InvalidParameterError` unless this blob may be put under namespace and key."""
    check_key(namespace, key)
    if not blob:
        raise InvalidParameterError("blob", "is empty")


class NullStore:
    """Keeps nothing."""

    name: Final = "null"

    def get(self, namespace: str, key: str) -> bytes | None:
        """See `KVStore.get`."""
        check_key(namespace, key)
        return None

    def put(self, namespace: str, key: str, blob: bytes) -> None:
        """See `KVStore.put`."""
        check_blob(namespace, key, blob)

    def delete_namespace(self, namespace: str) -> int:
        """See `KVStore.delete_namespace`."""
        check_namespace(namespace)
        return 0

    def close(self) -> None:
        """See `KVStore.close`."""


class _Kept(NamedTuple):
    blob: bytes
    expires_s: float


class MemoryStore:
    """Keeps blobs in this process, the most recently used ones, up to a number of bytes.

    All namespaces share the bytes. Blobs are not copied. `_lock` guards the rest: the sizes in
    `_kept`, which is in order of use, add up to `_num_bytes`, at most `max_bytes`.
    """

    name: Final = "memory"

    def __init__(
        self,
        max_bytes: int,
        *,
        max_age_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make an empty store.

        Args:
            max_bytes: Bytes of all blobs together; a larger blob is not taken.
            max_age_s: Seconds after which a blob is dropped, however often it is used. None keeps
                it until others need its room.
            clock: Seconds since some moment.

        Raises:
            InvalidParameterError: A limit is out of range.
        """
        require_int("max_bytes", max_bytes, 0, _MAX_BYTES)
        if max_age_s is not None:
            require_number("max_age_s", max_age_s, low=0.001, high=1e9)
        self.max_bytes = max_bytes
        self._max_age_s = float("inf") if max_age_s is None else max_age_s
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, str], _Kept] = OrderedDict()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the blobs that are kept."""
        return self._num_bytes

    def get(self, namespace: str, key: str) -> bytes | None:
        """See `KVStore.get`."""
        check_key(namespace, key)
        with self._lock:
            self._drop_expired()
            kept = self._kept.get((namespace, key))
            if kept is None:
                return None
            self._kept.move_to_end((namespace, key))
            return kept.blob

    def put(self, namespace: str, key: str, blob: bytes) -> None:
        """See `KVStore.put`; a blob larger than the whole store is not taken, without an error."""
        check_blob(namespace, key, blob)
        with self._lock:
            self._drop_expired()
            if (namespace, key) in self._kept:
                self._drop((namespace, key))
            if len(blob) > self.max_bytes:
                return
            while self._num_bytes + len(blob) > self.max_bytes:
                self._drop(next(iter(self._kept)))
            self._kept[namespace, key] = _Kept(blob, self._clock() + self._max_age_s)
            self._num_bytes += len(blob)

    def delete_namespace(self, namespace: str) -> int:
        """See `KVStore.delete_namespace`."""
        check_namespace(namespace)
        with self._lock:
            found = [place for place in self._kept if place[0] == namespace]
            for place in found:
                self._drop(place)
            return len(found)

    def close(self) -> None:
        """See `KVStore.close`."""
        with self._lock:
            self._kept.clear()
            self._num_bytes = 0

    def _drop_expired(self) -> None:
        # A few thousand blobs of a megabyte fill the largest machine: looking at all is cheap.
        now_s = self._clock()
        for place in [place for place, kept in self._kept.items() if kept.expires_s <= now_s]:
            self._drop(place)

    def _drop(self, place: tuple[str, str]) -> None:
        self._num_bytes -= len(self._kept.pop(place).blob)
