"""Reads the objects of one model from S3; each failure is one line that names the object."""

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, Final

from app.integrations.aws.s3_client import describe_failure, is_missing
from app.integrations.aws.weights.errors import WeightsError
from app.integrations.aws.weights.location import S3Location
from app.integrations.aws.weights.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    Manifest,
    ManifestFile,
    parse_manifest,
)

#: Small, so that what came before a line broke is counted, and a download told to stop does.
_READ_BYTES: Final = 256 << 10


class BrokenBodyError(Exception):
    """An answer began and did not arrive whole; trying again may help."""


class S3Reader:
    """Reads below one location; may be used by many threads at once."""

    def __init__(self, client: Any, location: S3Location) -> None:
        self._client = client
        self.location = location

    def read_manifest(self) -> Manifest:
        """Fetch the manifest.

        Raises:
            WeightsError: There is none, it is not acceptable, or S3 fails.
        """
        url = self.location.url_of(MANIFEST_NAME)
        answer = self._ask(self._client.get_object, MANIFEST_NAME)
        raw = bytearray()
        try:
            for chunk in _chunks(answer["Body"]):
                raw += chunk
                if len(raw) > MAX_MANIFEST_BYTES:
                    break
        except BrokenBodyError as error:
            raise WeightsError(f"{url}: {error}") from error
        return parse_manifest(bytes(raw), url)

    def look_up(self, file: ManifestFile) -> str:
        """Return the ETag of a file's object, which changes when it is replaced.

        Raises:
            WeightsError: It is missing, has another size than the manifest says, or S3 fails.
        """
        answer = self._ask(self._client.head_object, file.name)
        size = answer.get("ContentLength")
        if size != file.size:
            raise self._failed(file, f"has {size} bytes, the manifest says {file.size}")
        return str(answer.get("ETag"))

    def read_range(
        self, file: ManifestFile, etag: str, start: int, num_bytes: int
    ) -> Iterator[bytes]:
        """Yield some bytes of a file in pieces; all of them unless it raises.

        Raises:
            BrokenBodyError: They did not all arrive.
            WeightsError: The object was replaced since its ETag was read, or S3 fails.
        """
        wanted = f"bytes={start}-{start + num_bytes - 1}"
        answer = self._ask(self._client.get_object, file.name, Range=wanted, IfMatch=etag)
        with closing(answer["Body"]) as body:
            found = str(answer.get("ContentRange", "the whole object"))
            if found != f"bytes {start}-{start + num_bytes - 1}/{file.size}":
                raise self._failed(file, f"S3 sent {found[:80]!r} when asked for {wanted}")
            num_left = num_bytes
            for chunk in _chunks(body):
                num_left -= len(chunk)
                if num_left < 0:
                    raise BrokenBodyError("more bytes came than were asked for")
                yield chunk
            if num_left:
                raise BrokenBodyError(f"the answer ended {num_left:,} bytes early")

    def _ask(self, operation: Callable[..., Any], name: str, **conditions: str) -> Any:
        bucket, key = self.location.bucket, self.location.key_of(name)
        try:
            return operation(Bucket=bucket, Key=key, **conditions)
        except Exception as error:
            # Not the SDK's own errors alone: on an answer that is no S3's it raises anything.
            hint = ""
            if name == MANIFEST_NAME and is_missing(error):
                hint = "; `snapkv weights push` writes it"
            url = self.location.url_of(name)
            raise WeightsError(f"{url}: {describe_failure(error)}{hint}") from error

    def _failed(self, file: ManifestFile, reason: str) -> WeightsError:
        return WeightsError(f"{self.location.url_of(file.name)}: {reason}")


def _chunks(body: Any) -> Iterator[bytes]:
    while True:
        try:
            chunk: bytes = body.read(_READ_BYTES)
        except Exception as error:
            # The layers below raise whatever their own layers below raise about a line that broke.
            raise BrokenBodyError(f"the answer broke off ({type(error).__name__})") from error
        if not chunk:
            return
        yield chunk
