"""The store that replicas share: snapshots in Valkey, in chunks and with a time to live.

Keys, manifest and chunks are described in `layout`; which server holds them is `nodes`' business.
"""

import hashlib
import io
import math
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeVar

from valkey.exceptions import OutOfMemoryError

from app.integrations.aws.elasticache_token import ElastiCacheTokens
from app.integrations.valkey.config import MIN_CHUNK_BYTES, ValkeyConfig
from app.integrations.valkey.connection import CallDeadline, ConnectionLimits, Credentials
from app.integrations.valkey.exchange import Command, exchange, fetch
from app.integrations.valkey.failures import describe_failure
from app.integrations.valkey.layout import (
    BlobKeys,
    Manifest,
    decode_manifest,
    is_manifest_key,
    namespace_pattern,
)
from app.integrations.valkey.nodes import open_nodes
from snapkv_core import StoreError, check_blob, check_key, check_namespace

_Result = TypeVar("_Result")
_NAME: Final = "valkey"
#: Keys that a scan looks at per answer; also the most that are removed at once.
_SCAN_COUNT: Final = 1_000


def open_valkey_store(config: ValkeyConfig) -> "ValkeyStore":
    """Return the store of a configuration; connects to nothing.

    Raises:
        StoreError: It logs in to ElastiCache, and the AWS configuration is not complete.
    """
    if config.elasticache is None:
        return ValkeyStore(config)
    login = config.elasticache
    tokens = ElastiCacheTokens(login.cache_name, login.user_id, is_serverless=login.is_serverless)
    return ValkeyStore(config, credentials=tokens)


class ValkeyStore:
    """Keeps blobs in Valkey or Redis.

    Any thread may call. A call connects when it needs to, tries nothing twice but a command that
    a cluster sent elsewhere, and ends within the time that the configuration gives it.
    """

    name: Final = _NAME

    def __init__(
        self,
        config: ValkeyConfig,
        *,
        credentials: Credentials | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Connect to nothing yet.

        Args:
            config: Where to, and all limits.
            credentials: Says who logs in, in place of the configuration's user and password.
            clock: Seconds since some moment, for the age of logins.
        """
        self._config = config
        self._deadline = CallDeadline()
        limits = ConnectionLimits(self._deadline, config.connect_timeout_s, clock=clock)
        self._nodes = open_nodes(config, limits, credentials)

    def get(self, namespace: str, key: str) -> bytes | None:
        """See `KVStore.get`; what is left of a broken blob is removed."""
        check_key(namespace, key)
        keys = BlobKeys(namespace, key)
        return self._bounded(
            self._config.get_timeout_s,
            lambda: self._nodes.run(keys.manifest, lambda client: self._read(client, keys)),
        )

    def put(self, namespace: str, key: str, blob: bytes) -> None:
        """See `KVStore.put`."""
        check_blob(namespace, key, blob)
        if len(blob) > self._config.max_blob_bytes:
            raise StoreError(_NAME, f"a blob has more than {self._config.max_blob_bytes} bytes")
        keys = BlobKeys(namespace, key)
        manifest = Manifest(len(blob), self._config.chunk_bytes, hashlib.sha256(blob).hexdigest())
        self._bounded(
            self._config.put_timeout_s,
            lambda: self._nodes.run(
                keys.manifest, lambda client: self._write(client, keys, manifest, blob)
            ),
        )

    def delete_namespace(self, namespace: str) -> int:
        """See `KVStore.delete_namespace`; looks at every key of every primary."""
        check_namespace(namespace)
        return self._bounded(
            self._config.delete_timeout_s,
            lambda: sum(_sweep(client, namespace) for client in self._nodes.primaries()),
        )

    def close(self) -> None:
        """See `KVStore.close`."""
        self._nodes.close()

    def _bounded(self, timeout_s: float, call: Callable[[], _Result]) -> _Result:
        try:
            with self._deadline.within(timeout_s):
                return call()
        except StoreError:
            raise
        except Exception as error:
            # Not the library's own errors alone: on an answer that is no Valkey's it raises
            # anything.
            raise StoreError(_NAME, describe_failure(error)) from error

    def _read(self, client: Any, keys: BlobKeys) -> bytes | None:
        (raw,) = exchange(client, [("GET", keys.manifest)])
        if raw is None:
            return None
        manifest = decode_manifest(raw, self._config.max_blob_bytes, MIN_CHUNK_BYTES)
        if manifest is None:
            # It may be one of another version: it is left for the replicas that know it.
            return None
        # Its bytes are given away without a copy once they are filled in.
        blob = io.BytesIO(bytes(manifest.num_bytes))
        digest = hashlib.sha256()
        with blob.getbuffer() as view:
            for indices in manifest.trips(self._config.num_chunks_per_trip):
                chunks = [view[manifest.span(index)] for index in indices]
                if not fetch(client, keys.chunks(indices), chunks):
                    self._discard(client, keys, manifest)
                    return None
                for chunk in chunks:
                    digest.update(chunk)
        if digest.hexdigest() != manifest.sha256:
            self._discard(client, keys, manifest)
            return None
        return blob.getvalue()

    def _write(self, client: Any, keys: BlobKeys, manifest: Manifest, blob: bytes) -> None:
        view = memoryview(blob)
        # The first chunk is there before the manifest and must not be gone before it.
        chunk_ttl_s = self._config.ttl_s + math.ceil(self._config.put_timeout_s)
        # First of all the old blob ends: a reader must not find its manifest among new chunks.
        commands: list[Command] = [("UNLINK", keys.manifest)]
        try:
            for indices in manifest.trips(self._config.num_chunks_per_trip):
                for index in indices:
                    chunk = view[manifest.span(index)]
                    commands.append(("SET", keys.chunk(index), chunk, "EX", chunk_ttl_s))
                exchange(client, commands)
                commands = []
            last: Command = ("SET", keys.manifest, manifest.encode(), "EX", self._config.ttl_s)
            exchange(client, [last])
        except OutOfMemoryError:
            # What has been written of it would keep others out until it expires.
            self._discard(client, keys, manifest)
            raise

    def _discard(self, client: Any, keys: BlobKeys, manifest: Manifest) -> None:
        """Remove what there is of a blob, if that works."""
        chunks = keys.chunks(range(manifest.num_chunks))
        with suppress(Exception):
            exchange(client, [("UNLINK", keys.manifest, *chunks)])


def _sweep(client: Any, namespace: str) -> int:
    """Remove the keys of a namespace from one node; return how many blobs they made."""
    num_removed, cursor = 0, 0
    pattern = namespace_pattern(namespace)
    while True:
        scan: Command = ("SCAN", cursor, "MATCH", pattern, "COUNT", _SCAN_COUNT)
        ((cursor, keys),) = exchange(client, [scan])
        # One by one: keys of different slots may not stand in one command of a cluster.
        answers = exchange(client, [("UNLINK", key) for key in keys])
        # A scan may show a key twice; it is removed once.
        for key, num_unlinked in zip(keys, answers, strict=True):
            num_removed += int(num_unlinked) * is_manifest_key(key)
        if cursor == 0:
            return num_removed
