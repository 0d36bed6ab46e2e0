"""The large, slow and cheap store: snapshots as objects of an S3 bucket.

Calls run on threads of their own, which are left to themselves when a call's time is up: the SDK
limits each read and write, but no transfer as a whole.
"""

import hashlib
import io
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from boto3.s3.transfer import TransferConfig
from botocore.exceptions import ClientError

from app.integrations.aws.s3_client import create_s3_client, describe_failure, is_missing
from app.integrations.aws.weights.location import S3Location
from app.integrations.aws.workers import run_parallel
from snapkv_core import (
    InvalidParameterError,
    StoreError,
    check_blob,
    check_key,
    check_namespace,
)
from snapkv_core.validation import require_int, require_number

_Task = TypeVar("_Task")
_NAME: Final = "s3"
#: Metadata of an object: the SHA-256 of its content, as hex digits.
_SHA256: Final = "sha256"
#: The smallest part of an upload that S3 takes, apart from the last one.
_MIN_PART_BYTES: Final = 5 << 20
_CONNECT_TIMEOUT_S: Final = 2.0
_READ_TIMEOUT_S: Final = 5.0
_MAX_ATTEMPTS: Final = 2
_TICK_S: Final = 0.05
#: Objects that are listed at once; also the most that are deleted at once.
_PAGE_OBJECTS: Final = 1_000
_RANGE: Final = re.compile(r"bytes (\d{1,15})-\d{1,15}/(\d{1,15})")


@dataclass(frozen=True, slots=True, kw_only=True)
class S3StoreConfig:
    """Where in S3, how encrypted, and how long calls may take.

    Attributes:
        location: Bucket, and what all keys begin with.
        kms_key_id: Key of KMS that objects are encrypted with; None leaves it to the bucket.
        part_bytes: Bytes that one request sends or asks for; larger blobs travel in parts.
        num_parallel: Parts of one call that travel at once.
        max_connections: Connections to S3, for all calls that run at once.
        max_blob_bytes: Bytes of the largest blob that is put or read.
        get_timeout_s: Seconds that `get` may take, and at most a second more.
        put_timeout_s: Seconds that `put` may take, likewise.
        delete_timeout_s: Seconds that `delete_namespace` may take, likewise.
    """

    location: S3Location
    kms_key_id: str | None = None
    part_bytes: int = 8 << 20
    num_parallel: int = 8
    max_connections: int = 32
    max_blob_bytes: int = 1 << 30
    get_timeout_s: float = 10.0
    put_timeout_s: float = 120.0
    delete_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            InvalidParameterError: A value is out of range.
        """
        if self.kms_key_id is not None and not self.kms_key_id:
            raise InvalidParameterError("kms_key_id", "is empty")
        require_int("part_bytes", self.part_bytes, _MIN_PART_BYTES, 1 << 30)
        require_int("num_parallel", self.num_parallel, 1, 64)
        require_int("max_connections", self.max_connections, 1, 1_024)
        require_int("max_blob_bytes", self.max_blob_bytes, 1, 1 << 36)
        for name in ("get", "put", "delete"):
            timeout = f"{name}_timeout_s"
            require_number(timeout, getattr(self, timeout), low=0.01, high=3_600.0)


def open_s3_store(config: S3StoreConfig) -> "S3Store":
    """Return the store of a configuration; calls nothing yet.

    Raises:
        StoreError: The SDK's own configuration is not acceptable.
    """
    try:
        client = create_s3_client(
            max_connections=config.max_connections,
            connect_timeout_s=_CONNECT_TIMEOUT_S,
            read_timeout_s=_READ_TIMEOUT_S,
            max_attempts=_MAX_ATTEMPTS,
        )
    except Exception as error:
        # The SDK raises errors of its own and plain ones about its configuration.
        raise StoreError(_NAME, f"the AWS SDK's configuration: {type(error).__name__}") from error
    return S3Store(config, client)


@dataclass(frozen=True, slots=True)
class _Part:
    """What one request brought.

    Attributes:
        content: The bytes.
        num_bytes: Bytes of the whole object.
        etag: Changes when the object is replaced.
        sha256: What the object's metadata says of its content; empty where it says nothing.
    """

    content: bytes
    num_bytes: int
    etag: str
    sha256: str


class S3Store:
    """Keeps blobs in a bucket; any thread may call.

    An object's key is `prefix/namespace/key`. S3 shows an object only once it is there as a whole,
    and keeps it until a lifecycle rule of the bucket removes it.
    """

    name: Final = _NAME

    def __init__(self, config: S3StoreConfig, client: Any) -> None:
        """Keep blobs through a client, whose every read and write must end by itself."""
        self._config = config
        self._client = client
        self._bucket = config.location.bucket

    def get(self, namespace: str, key: str) -> bytes | None:
        """See `KVStore.get`; an object with another content than it was put with is removed."""
        check_key(namespace, key)
        name = self._name_of(namespace, key)
        check_time = _time_limit(self._config.get_timeout_s)
        with _store_errors():
            try:
                return self._read(name, check_time)
            except ClientError as error:
                if is_missing(error):
                    return None
                raise

    def put(self, namespace: str, key: str, blob: bytes) -> None:
        """See `KVStore.put`; what was there before stays until the new blob has arrived."""
        check_blob(namespace, key, blob)
        if len(blob) > self._config.max_blob_bytes:
            raise StoreError(_NAME, f"a blob has more than {self._config.max_blob_bytes} bytes")
        arguments: dict[str, Any] = {"Metadata": {_SHA256: hashlib.sha256(blob).hexdigest()}}
        if self._config.kms_key_id is not None:
            arguments["ServerSideEncryption"] = "aws:kms"
            arguments["SSEKMSKeyId"] = self._config.kms_key_id
        transfer = TransferConfig(
            multipart_threshold=self._config.part_bytes + 1,
            multipart_chunksize=self._config.part_bytes,
            max_concurrency=self._config.num_parallel,
        )

        def upload(name: str, _stop: threading.Event) -> None:
            self._client.upload_fileobj(
                io.BytesIO(blob), self._bucket, name, ExtraArgs=arguments, Config=transfer
            )

        check_time = _time_limit(self._config.put_timeout_s)
        with _store_errors():
            self._parallel([self._name_of(namespace, key)], upload, check_time)

    def delete_namespace(self, namespace: str) -> int:
        """See `KVStore.delete_namespace`; a bucket that keeps versions keeps the old ones."""
        check_namespace(namespace)
        num_removed: list[int] = []

        def sweep(prefix: str, stop: threading.Event) -> None:
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=prefix, PaginationConfig={"PageSize": _PAGE_OBJECTS}
            )
            for page in pages:
                if stop.is_set():
                    return
                num_removed.append(self._delete([item["Key"] for item in page.get("Contents", [])]))

        check_time = _time_limit(self._config.delete_timeout_s)
        with _store_errors():
            self._parallel([self._config.location.key_of(f"{namespace}/")], sweep, check_time)
        return sum(num_removed)

    def close(self) -> None:
        """See `KVStore.close`."""
        self._client.close()

    def _name_of(self, namespace: str, key: str) -> str:
        return self._config.location.key_of(f"{namespace}/{key}")

    def _read(self, name: str, check_time: Callable[[], None]) -> bytes | None:
        blob, guard = io.BytesIO(), threading.Lock()
        heads: list[_Part] = []

        def fetch(start: int, _stop: threading.Event) -> None:
            # What comes after the first part must belong to the same object.
            part = self._part(name, start, heads[0].etag if heads else None)
            with guard:
                heads.append(part)
                blob.seek(start)
                blob.write(part.content)

        self._parallel([0], fetch, check_time)
        head = heads[0]
        if not head.sha256 or head.num_bytes > self._config.max_blob_bytes:
            return None  # no object of ours
        self._parallel(
            range(self._config.part_bytes, head.num_bytes, self._config.part_bytes),
            fetch,
            check_time,
        )
        found = blob.getvalue()
        if hashlib.sha256(found).hexdigest() == head.sha256:
            return found

        def discard(name: str, _stop: threading.Event) -> None:
            self._delete([name])

        with suppress(Exception):
            self._parallel([name], discard, check_time)
        return None

    def _part(self, name: str, start: int, etag: str | None) -> _Part:
        last = start + self._config.part_bytes - 1
        condition = {} if etag is None else {"IfMatch": etag}
        answer = self._client.get_object(
            Bucket=self._bucket, Key=name, Range=f"bytes={start}-{last}", **condition
        )
        with closing(answer["Body"]) as body:
            content: bytes = body.read()
        found = _RANGE.fullmatch(str(answer.get("ContentRange")))
        num_bytes = int(found[2]) if found else 0
        if not found or int(found[1]) != start or len(content) != min(last + 1, num_bytes) - start:
            raise StoreError(_NAME, "the answer holds other bytes than were asked for")
        sha256 = str(answer.get("Metadata", {}).get(_SHA256, ""))
        return _Part(content, num_bytes, str(answer.get("ETag")), sha256)

    def _delete(self, names: list[str]) -> int:
        if not names:
            return 0
        answer = self._client.delete_objects(
            Bucket=self._bucket,
            Delete={"Objects": [{"Key": name} for name in names], "Quiet": True},
        )
        if errors := answer.get("Errors"):
            raise StoreError(_NAME, f"{len(errors)} objects could not be deleted")
        return len(names)

    def _parallel(
        self,
        tasks: Sequence[_Task],
        work: Callable[[_Task, threading.Event], None],
        check_time: Callable[[], None],
    ) -> None:
        if tasks:
            num_threads = min(len(tasks), self._config.num_parallel)
            run_parallel(tasks, work, num_threads=num_threads, on_tick=check_time, tick_s=_TICK_S)


def _time_limit(timeout_s: float) -> Callable[[], None]:
    """Return what raises when the time is up that begins now."""
    ends_s = time.monotonic() + timeout_s

    def check() -> None:
        if time.monotonic() > ends_s:
            raise StoreError(_NAME, f"it took longer than {timeout_s:g} s")

    return check


@contextmanager
def _store_errors() -> Iterator[None]:
    """Turn whatever is raised within the block into the error of a store."""
    try:
        yield
    except StoreError:
        raise
    except Exception as error:
        # Not the SDK's own errors alone: on an answer that is no S3's it raises anything.
        raise StoreError(_NAME, describe_failure(error)) from error
