"""A snapshot as bytes and back; no byte is believed before all of them are checked (ADR 0014).

```text
magic            8   0x89, SNAPKV, a line feed
format version   4   little-endian, as all numbers
header length    4
header               canonical JSON: identity, lengths, report, kind of body
document length  8   }  once for the prompt,
document             }  then for each layer: safetensors
checksum        32   SHA-256 of all before it
```
"""

import hashlib
import io
import struct
from collections.abc import Iterator
from typing import Final

import torch

from snapkv_core.errors import SnapshotError
from snapkv_core.kv_cache.snapshot import (
    KV_DTYPES,
    SNAPSHOT_BODIES,
    SNAPSHOT_FORMAT_VERSION,
    PromptSnapshot,
    SnapshotBody,
    SnapshotIdentity,
    check_snapshot,
)
from snapkv_core.kv_cache.snapshot_body import (
    LayerFormat,
    index_dtype_for,
    read_prompt,
    write_prompt,
)
from snapkv_core.kv_cache.snapshot_header import read_header, write_header
from snapkv_core.validation import require_choice

#: Begins with a byte that no text has and ends with one that a text mode would change.
_MAGIC: Final = b"\x89SNAPKV\n"
_PREFIX: Final = struct.Struct("<8sII")
_DOCUMENT_LENGTH: Final = struct.Struct("<Q")
_CHECKSUM_BYTES: Final = 32


def encode_snapshot(
    snapshot: PromptSnapshot, identity: SnapshotIdentity, *, body: SnapshotBody = "exact"
) -> bytes:
    """Write a snapshot as bytes.

    Beside the snapshot itself, memory holds the bytes once, in a buffer that may have room for
    an eighth more, and one layer two or three times: its document as the library writes it, the
    copy that it returns, and for `int8` one KV head in float32. Copying and hashing are done by
    layers, so the interpreter's lock is held for a layer's bytes at a time.

    Args:
        snapshot: Of a prompt that was read to its end.
        identity: What it was read with.
        body: `exact`, or `int8` for keys and values in 8 bits; the rest is exact either way.

    Returns:
        What `decode_snapshot` takes.

    Raises:
        InvalidParameterError: No such body.
        SnapshotError: The snapshot does not fit the identity or itself, or the body is `int8`
            and a key or value is not finite.
    """
    require_choice("body", body, SNAPSHOT_BODIES)
    check_snapshot(snapshot, identity)
    checksum = hashlib.sha256()
    blob = io.BytesIO()
    for part in _parts(snapshot, identity, body):
        checksum.update(part)
        blob.write(part)
    blob.write(checksum.digest())
    return blob.getvalue()  # hands the buffer over, where join() would have copied every part


def decode_snapshot(
    blob: bytes | memoryview, identity: SnapshotIdentity, *, body: SnapshotBody | None = None
) -> PromptSnapshot:
    """Read a snapshot that was written for this identity.

    Beside the bytes and the tensors that are returned, memory holds a copy of one layer's
    document at a time, and for `int8` its codes. No tensor points into `blob`.

    Args:
        blob: From `encode_snapshot`.
        identity: What the prompt would be read with.
        body: The only kind of body to take; None takes either. A reader that promises exact
            answers must say `exact`, for who else writes to a store may have chosen otherwise.

    Returns:
        The snapshot that was encoded; keys and values of an `int8` body are near the original.

    Raises:
        SnapshotError: The bytes are anything else; names what differs.
    """
    header_bytes, documents_bytes = _checked(memoryview(blob))
    header = read_header(bytes(header_bytes), identity)
    if body is not None and header.body != body:
        raise SnapshotError(f"body: has {header.body}, wanted {body}")
    documents = _split(documents_bytes, 1 + identity.num_layers)
    dtype = KV_DTYPES[identity.dtype]
    last_hidden = read_prompt(bytes(documents[0]), dtype, identity.hidden_size)
    index_dtype = index_dtype_for(header.num_prompt_tokens) if header.has_kept_indices else None
    layer_format = LayerFormat(header.body, dtype, identity.head_dim, index_dtype)
    layers = [
        layer_format.read(layer_idx, header.kv_lens[layer_idx], bytes(document))
        for layer_idx, document in enumerate(documents[1:])
    ]
    snapshot = PromptSnapshot(
        keys=tuple(keys for keys, _, _ in layers),
        values=tuple(values for _, values, _ in layers),
        kv_lens=torch.tensor(header.kv_lens, dtype=torch.int32),
        kept_indices=tuple(kept for _, _, kept in layers if kept is not None) or None,
        last_hidden=last_hidden,
        num_prompt_tokens=header.num_prompt_tokens,
        kept_attention_mass=header.kept_attention_mass,
    )
    check_snapshot(snapshot, identity)
    return snapshot


def _parts(
    snapshot: PromptSnapshot, identity: SnapshotIdentity, body: SnapshotBody
) -> Iterator[bytes]:
    """Yield everything before the checksum, one document at a time."""
    header = write_header(snapshot, identity, body)
    yield _PREFIX.pack(_MAGIC, SNAPSHOT_FORMAT_VERSION, len(header))
    yield header
    for document in _documents(snapshot, identity, body):
        yield _DOCUMENT_LENGTH.pack(len(document))
        yield document


def _documents(
    snapshot: PromptSnapshot, identity: SnapshotIdentity, body: SnapshotBody
) -> Iterator[bytes]:
    yield write_prompt(snapshot.last_hidden)
    kept = snapshot.kept_indices
    index_dtype = None if kept is None else index_dtype_for(snapshot.num_prompt_tokens)
    layer_format = LayerFormat(body, KV_DTYPES[identity.dtype], identity.head_dim, index_dtype)
    for layer_idx, lens in enumerate(snapshot.kv_lens.tolist()):
        yield layer_format.write(
            layer_idx,
            lens,
            snapshot.keys[layer_idx],
            snapshot.values[layer_idx],
            None if kept is None else kept[layer_idx],
        )


def _checked(blob: memoryview) -> tuple[memoryview, memoryview]:
    """Return header and documents of bytes that are, to the last, those that were written."""
    if len(blob) < _PREFIX.size + _CHECKSUM_BYTES:
        raise SnapshotError(f"size: {len(blob)} bytes are too few for a snapshot")
    magic, version, num_header_bytes = _PREFIX.unpack_from(blob)
    if magic != _MAGIC:
        raise SnapshotError("magic: these are no bytes of a snapshot")
    if version != SNAPSHOT_FORMAT_VERSION:
        raise SnapshotError(f"format version: has {version}, wanted {SNAPSHOT_FORMAT_VERSION}")
    covered, checksum = blob[:-_CHECKSUM_BYTES], blob[-_CHECKSUM_BYTES:]
    if hashlib.sha256(covered).digest() != bytes(checksum):
        raise SnapshotError("checksum: bytes are missing, added or changed")
    header_end = _PREFIX.size + num_header_bytes
    if header_end > len(covered):
        raise SnapshotError(f"header: {num_header_bytes} bytes exceed the snapshot")
    return covered[_PREFIX.size : header_end], covered[header_end:]


def _split(documents_bytes: memoryview, num_documents: int) -> list[memoryview]:
    """Cut what lies between header and checksum into exactly so many documents."""
    documents: list[memoryview] = []
    rest = documents_bytes
    while len(rest) >= _DOCUMENT_LENGTH.size and len(documents) < num_documents:
        (num_bytes,) = _DOCUMENT_LENGTH.unpack_from(rest)
        rest = rest[_DOCUMENT_LENGTH.size :]
        if num_bytes > len(rest):
            raise SnapshotError(f"document {len(documents)}: {num_bytes} bytes exceed the snapshot")
        documents.append(rest[:num_bytes])
        rest = rest[num_bytes:]
    if len(documents) != num_documents or len(rest):
        raise SnapshotError(f"documents: wanted {num_documents} and nothing behind them")
    return documents
