"""The bytes of a snapshot, taken apart and put together by hand, as ADR 0014 describes them.

Shares no code with the codec and uses no library for documents, so that a test can forge bytes
whose checksum is right.
"""

import hashlib
import json
import struct
from dataclasses import dataclass
from typing import Any

CHECKSUM_BYTES = 32
PREFIX_BYTES = 16

#: Name of a dtype, shape and data, by the name of the tensor.
Document = dict[str, tuple[str, list[int], bytes]]


@dataclass
class SnapshotParts:
    """What lies in the bytes of a snapshot, free to be changed."""

    magic: bytes
    version: int
    header: bytes
    documents: list[bytes]

    @property
    def members(self) -> dict[str, Any]:
        """What the header says."""
        members: dict[str, Any] = json.loads(self.header)
        return members

    def set_members(self, **changes: Any) -> None:
        """Write the header anew with other members; one that becomes None is left out."""
        members = {k: v for k, v in (self.members | changes).items() if v is not None}
        self.header = json.dumps(members, sort_keys=True, separators=(",", ":")).encode()

    def joined(self) -> bytes:
        """Put everything together under a checksum that fits."""
        body = b"".join(struct.pack("<Q", len(one)) + one for one in self.documents)
        prefix = self.magic + struct.pack("<II", self.version, len(self.header))
        return signed(prefix + self.header + body)


def signed(covered: bytes) -> bytes:
    """Append the checksum of some bytes."""
    return covered + hashlib.sha256(covered).digest()


def take_apart(blob: bytes) -> SnapshotParts:
    """Read the parts of a snapshot that is whole."""
    covered = blob[:-CHECKSUM_BYTES]
    assert signed(covered) == blob
    version, num_header_bytes = struct.unpack("<II", covered[8:PREFIX_BYTES])
    rest = covered[PREFIX_BYTES + num_header_bytes :]
    documents = []
    while rest:
        (num_bytes,) = struct.unpack("<Q", rest[:8])
        documents.append(rest[8 : 8 + num_bytes])
        assert len(documents[-1]) == num_bytes
        rest = rest[8 + num_bytes :]
    return SnapshotParts(covered[:8], version, covered[PREFIX_BYTES:][:num_header_bytes], documents)


def read_document(document: bytes) -> Document:
    """Read a safetensors document."""
    (num_bytes,) = struct.unpack("<Q", document[:8])
    described = json.loads(document[8 : 8 + num_bytes])
    data = document[8 + num_bytes :]
    return {
        name: (one["dtype"], one["shape"], data[slice(*one["data_offsets"])])
        for name, one in described.items()
    }


def write_document(tensors: Document) -> bytes:
    """Write a safetensors document."""
    described, data = {}, b""
    for name, (dtype, shape, part) in tensors.items():
        offsets = [len(data), len(data) + len(part)]
        described[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += part
    header = json.dumps(described).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + data
