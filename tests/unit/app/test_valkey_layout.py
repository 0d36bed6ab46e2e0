"""How a blob lies in Valkey: keys, chunks and the manifest."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from valkey.crc import key_slot

from app.integrations.valkey.layout import (
    BlobKeys,
    Manifest,
    decode_manifest,
    is_manifest_key,
    namespace_pattern,
)

KEYS = BlobKeys("tenant-1", "0f" * 32)
SHA256 = "a" * 64


def decode(raw: bytes) -> Manifest | None:
    """Decode with limits of a million bytes and chunks of ten."""
    return decode_manifest(raw, 1_000_000, 10)


def test_keys_of_a_blob_are_on_one_slot() -> None:
    """So that one node of a cluster answers for the whole blob."""
    names = [KEYS.manifest, *KEYS.chunks(range(70))]
    assert names[:2] == [
        "snapkv:{tenant-1:" + "0f" * 32 + "}:m",
        "snapkv:{tenant-1:" + "0f" * 32 + "}:0",
    ]
    assert len({key_slot(name.encode()) for name in names}) == 1


def test_blobs_of_a_namespace_are_on_many_slots() -> None:
    """The key is part of what is hashed."""
    keys = [BlobKeys("tenant-1", f"{number:064x}") for number in range(50)]
    assert len({key_slot(key.manifest.encode()) for key in keys}) > 40


def test_pattern_holds_nothing_that_matches_other_namespaces() -> None:
    """What a namespace may hold means itself in a pattern, up to the colon after it."""
    assert namespace_pattern("tenant-1") == "snapkv:{tenant-1:*"
    assert KEYS.manifest.startswith("snapkv:{tenant-1:")


def test_only_manifests_count_as_blobs() -> None:
    """A blob has one."""
    assert is_manifest_key(KEYS.manifest.encode())
    assert not is_manifest_key(KEYS.chunk(0).encode())


@given(
    num_bytes=st.integers(1, 5_000),
    chunk_bytes=st.integers(1, 700),
    num_chunks_per_trip=st.integers(1, 9),
)
def test_trips_cover_the_blob_once_and_in_order(
    num_bytes: int, chunk_bytes: int, num_chunks_per_trip: int
) -> None:
    """No trip has more chunks than may travel, and no chunk more bytes than it may."""
    blob = bytes(number % 251 for number in range(num_bytes))
    manifest = Manifest(num_bytes, chunk_bytes, SHA256)
    trips = manifest.trips(num_chunks_per_trip)
    chunks = [blob[manifest.span(index)] for trip in trips for index in trip]
    assert b"".join(chunks) == blob
    assert len(chunks) == manifest.num_chunks
    assert {len(chunk) for chunk in chunks[:-1]} <= {chunk_bytes}
    assert 1 <= len(chunks[-1]) <= chunk_bytes
    assert max(len(trip) for trip in trips) <= num_chunks_per_trip


def test_manifest_is_read_as_it_was_written() -> None:
    """Its form is part of the contract between versions."""
    manifest = Manifest(1_000, 10, SHA256)
    assert json.loads(manifest.encode()) == {
        "version": 1,
        "num_bytes": 1_000,
        "chunk_bytes": 10,
        "sha256": SHA256,
    }
    assert decode(manifest.encode()) == manifest


@pytest.mark.parametrize(
    "changed",
    [
        {"version": 2},
        {"version": "1"},
        {"version": True},
        {"num_bytes": 0},
        {"num_bytes": 1_000_001},
        {"num_bytes": 10.0},
        {"chunk_bytes": 9},
        {"chunk_bytes": None},
        {"sha256": "a" * 63},
        {"sha256": 1},
        {"more": 1},
    ],
)
def test_manifest_with_another_value_is_none(changed: dict[str, Any]) -> None:
    """Nothing is guessed."""
    fields = json.loads(Manifest(1_000, 10, SHA256).encode())
    assert decode(json.dumps(fields | changed).encode()) is None


@pytest.mark.parametrize(
    "raw", [b"", b"\xff", b"null", b"[]", b"{}", b"1" * 5_000, b"[" * 100_000, b'{"version":1}']
)
def test_what_is_no_manifest_is_none(raw: bytes) -> None:
    """Whatever wrote it."""
    assert decode(raw) is None
