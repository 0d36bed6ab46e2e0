"""Hashes of files and of parts of them."""

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

CHUNK_BYTES: Final = 1 << 20
#: A link in place of a file is an error, not a way to somewhere else.
READ_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


def hash_range(descriptor: int, start: int, size: int) -> str:
    """Return the SHA-256 of some bytes of an open file; of fewer where it ends before them."""
    digest = hashlib.sha256()
    for chunk in _chunks(descriptor, start, size):
        digest.update(chunk)
    return digest.hexdigest()


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file."""
    descriptor = os.open(path, READ_FLAGS)
    try:
        return hash_range(descriptor, 0, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


def hash_with_parts(path: Path, part_size: int, on_bytes: Callable[[int], None]) -> dict[str, Any]:
    """Hash a file and its parts in one pass.

    Args:
        path: The file.
        part_size: Bytes of a part.
        on_bytes: Told how many more bytes were read.

    Returns:
        The fields `size`, `sha256` and `parts` of a manifest's file.
    """
    descriptor = os.open(path, READ_FLAGS)
    try:
        size = os.fstat(descriptor).st_size
        whole, parts = hashlib.sha256(), []
        for start in range(0, size, part_size):
            part = hashlib.sha256()
            for chunk in _chunks(descriptor, start, min(part_size, size - start)):
                whole.update(chunk)
                part.update(chunk)
                on_bytes(len(chunk))
            parts.append(part.hexdigest())
    finally:
        os.close(descriptor)
    return {"size": size, "sha256": whole.hexdigest(), "parts": tuple(parts)}


def _chunks(descriptor: int, start: int, size: int) -> Iterator[bytes]:
    end = start + size
    while start < end:
        chunk = os.pread(descriptor, min(CHUNK_BYTES, end - start), start)
        if not chunk:
            return
        yield chunk
        start += len(chunk)
