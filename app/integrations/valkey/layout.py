"""How a blob lies in Valkey: chunks, and a manifest written after them that makes them one.

The braces in the keys put all keys of a blob on one slot of a cluster, so that one node answers
for the whole of it. It knows no client.
"""

import json
import re
from dataclasses import dataclass
from typing import Any, Final

#: Of the manifest's form; a reader takes another one for a blob that is not there.
MANIFEST_VERSION: Final = 1
_FIELDS: Final = {"version", "num_bytes", "chunk_bytes", "sha256"}
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_MANIFEST_SUFFIX: Final = ":m"


def namespace_pattern(namespace: str) -> str:
    """Return the pattern that the keys of a namespace match, and no others."""
    return f"snapkv:{{{namespace}:*"


def is_manifest_key(key: bytes) -> bool:
    """Tell whether a key that matched is one of a manifest: blobs are counted by them."""
    return key.endswith(_MANIFEST_SUFFIX.encode())


@dataclass(frozen=True, slots=True)
class BlobKeys:
    """The keys of one blob.

    Attributes:
        namespace: Namespace of the blob, which has been checked.
        key: Its key, which has been checked.
    """

    namespace: str
    key: str

    @property
    def manifest(self) -> str:
        """Key of the manifest."""
        return f"{self._prefix}{_MANIFEST_SUFFIX}"

    def chunk(self, index: int) -> str:
        """Return the key of a chunk, counted from 0."""
        return f"{self._prefix}:{index}"

    def chunks(self, indices: range) -> list[str]:
        """Return the keys of several chunks."""
        return [self.chunk(index) for index in indices]

    @property
    def _prefix(self) -> str:
        return f"snapkv:{{{self.namespace}:{self.key}}}"


@dataclass(frozen=True, slots=True)
class Manifest:
    """What the chunks of a blob must be.

    Attributes:
        num_bytes: Bytes of the blob, at least one.
        chunk_bytes: Bytes of each chunk but the last, which holds the rest.
        sha256: SHA-256 of the blob, as hex digits.
    """

    num_bytes: int
    chunk_bytes: int
    sha256: str

    @property
    def num_chunks(self) -> int:
        """Number of chunks."""
        return -(-self.num_bytes // self.chunk_bytes)

    def trips(self, num_chunks_per_trip: int) -> list[range]:
        """Return the indices of the chunks, as many at a time as travel at once."""
        firsts = range(0, self.num_chunks, num_chunks_per_trip)
        return [range(first, min(first + num_chunks_per_trip, self.num_chunks)) for first in firsts]

    def span(self, index: int) -> slice:
        """Return which bytes of the blob a chunk holds."""
        start = index * self.chunk_bytes
        return slice(start, min(start + self.chunk_bytes, self.num_bytes))

    def encode(self) -> bytes:
        """Return the value of the manifest's key."""
        fields = {
            "version": MANIFEST_VERSION,
            "num_bytes": self.num_bytes,
            "chunk_bytes": self.chunk_bytes,
            "sha256": self.sha256,
        }
        return json.dumps(fields, separators=(",", ":")).encode()


def decode_manifest(raw: bytes, max_blob_bytes: int, min_chunk_bytes: int) -> Manifest | None:
    """Read a manifest; None unless it is of this version and describes a blob within the limits.

    Args:
        raw: Value of the manifest's key.
        max_blob_bytes: Bytes of the largest blob that may be read.
        min_chunk_bytes: Bytes of the smallest chunk, so that no value makes a reader ask without
            end.
    """
    try:
        fields: Any = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or fields.keys() != _FIELDS:
        return None
    numbers = (fields["version"], fields["num_bytes"], fields["chunk_bytes"])
    if not all(type(number) is int for number in numbers) or numbers[0] != MANIFEST_VERSION:
        return None
    if not 1 <= numbers[1] <= max_blob_bytes or numbers[2] < min_chunk_bytes:
        return None
    if not isinstance(fields["sha256"], str) or not _SHA256.fullmatch(fields["sha256"]):
        return None
    return Manifest(numbers[1], numbers[2], fields["sha256"])
