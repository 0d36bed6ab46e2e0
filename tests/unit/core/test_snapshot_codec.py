"""A snapshot comes back from its bytes as it was, and the bytes are what the format says."""

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from snapkv_core import CompressionConfig, InvalidParameterError, SnapshotError
from snapkv_core.kv_cache.snapshot import PromptSnapshot, SnapshotIdentity
from snapkv_core.kv_cache.snapshot_codec import decode_snapshot, encode_snapshot
from tests.oracles.snapshot_bytes import read_document, take_apart
from tests.support.snapshots import RAGGED, assert_same, new_identity, new_snapshot

GOLDEN = Path(__file__).parent / "golden"
DTYPES = ("float32", "bfloat16", "float16")


def large_identity(dtype: str) -> SnapshotIdentity:
    """Return the identity of a model of 30 layers with three KV heads of 64."""
    return new_identity(
        dtype=dtype,
        compression=CompressionConfig("snapkv", 512, 16, 15, "max"),
        num_layers=30,
        head_dim=64,
        hidden_size=576,
    )


def large_snapshot(identity: SnapshotIdentity) -> PromptSnapshot:
    """Draw what 6,000 prompt tokens leave at a capacity of 512."""
    return new_snapshot(identity, [[512] * 3] * 30, num_prompt_tokens=6_000)


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_comes_back_to_the_bit(dtype: str) -> None:
    identity = new_identity(dtype=dtype)
    snapshot = new_snapshot(identity, RAGGED)
    assert_same(decode_snapshot(encode_snapshot(snapshot, identity), identity), snapshot)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prompt_that_lost_nothing_comes_back_without_positions(dtype: str) -> None:
    identity = new_identity(dtype=dtype)
    snapshot = new_snapshot(identity, [[12] * 3] * 2, keeps_all=True)
    found = decode_snapshot(encode_snapshot(snapshot, identity), identity)
    assert found.kept_indices is None
    assert_same(found, snapshot)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 4, 2), (5, 1, 3), (3, 2, 8)])
def test_models_of_any_shape_come_back(shape: tuple[int, int, int]) -> None:
    num_layers, num_kv_heads, head_dim = shape
    identity = new_identity(num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim)
    lens = [
        [1 + (layer + head) % 12 for head in range(num_kv_heads)] for layer in range(num_layers)
    ]
    snapshot = new_snapshot(identity, lens, seed=3)
    assert_same(decode_snapshot(encode_snapshot(snapshot, identity), identity), snapshot)


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_that_are_none_come_back_too(dtype: str) -> None:
    identity = new_identity(dtype=dtype)
    snapshot = new_snapshot(identity, RAGGED)
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])
    snapshot.keys[0][0] = odd
    snapshot.last_hidden[:4] = odd
    assert_same(decode_snapshot(encode_snapshot(snapshot, identity), identity), snapshot)


def test_views_of_larger_tensors_are_written_as_what_they_show() -> None:
    identity = new_identity()
    plain = new_snapshot(identity, RAGGED)
    stored = torch.cat((plain.keys[0], plain.values[0]))  # K and V in one piece of memory
    num_entries = len(plain.keys[0])
    states = torch.stack((torch.zeros(5), plain.last_hidden), dim=1)
    viewed = PromptSnapshot(
        keys=(stored[:num_entries], plain.keys[1].t().contiguous().t()),
        values=(stored[num_entries:], plain.values[1]),
        kv_lens=plain.kv_lens,
        kept_indices=plain.kept_indices,
        last_hidden=states[:, 1],
        num_prompt_tokens=plain.num_prompt_tokens,
        kept_attention_mass=plain.kept_attention_mass,
    )
    assert encode_snapshot(viewed, identity) == encode_snapshot(plain, identity)


@pytest.mark.parametrize("body", ["exact", "int8"])
def test_encoding_leaves_the_snapshot_alone(body: Any) -> None:
    identity = new_identity()
    snapshot = new_snapshot(identity, RAGGED)
    encode_snapshot(snapshot, identity, body=body)
    assert_same(snapshot, new_snapshot(identity, RAGGED))


@pytest.mark.parametrize("wrap", [bytes, memoryview, lambda blob: memoryview(b"--" + blob)[2:]])
def test_bytes_and_views_of_them_are_read_alike(wrap: Callable[[bytes], Any]) -> None:
    identity = new_identity()
    snapshot = new_snapshot(identity, RAGGED)
    assert_same(decode_snapshot(wrap(encode_snapshot(snapshot, identity)), identity), snapshot)


def test_what_was_read_does_not_change_with_the_bytes() -> None:
    identity = new_identity()
    snapshot = new_snapshot(identity, RAGGED)
    blob = bytearray(encode_snapshot(snapshot, identity))
    found = decode_snapshot(memoryview(blob), identity)
    blob[:] = bytes(len(blob))
    assert_same(found, snapshot)


def test_the_same_snapshot_gives_the_same_bytes() -> None:
    identity = new_identity()
    blobs = {encode_snapshot(new_snapshot(identity, RAGGED), identity) for _ in range(2)}
    assert len(blobs) == 1


def test_the_bytes_are_laid_out_as_documented() -> None:
    identity = new_identity()
    snapshot = new_snapshot(identity, RAGGED)
    parts = take_apart(encode_snapshot(snapshot, identity))
    assert (parts.magic, parts.version) == (b"\x89SNAPKV\n", 1)
    assert parts.members == {
        "body": "exact",
        "has_kept_indices": True,
        "identity": identity.fields(),
        "kept_attention_mass": 0.8125,
        "kv_lens": RAGGED,
        "num_prompt_tokens": 12,
    }
    prompt, *layers = map(read_document, parts.documents)
    hidden = struct.pack("<5f", *snapshot.last_hidden.tolist())
    assert prompt == {"last_hidden": ("F32", [5], hidden)}
    assert snapshot.kept_indices is not None
    for layer_idx, num_entries in enumerate([11, 11]):
        keys = snapshot.keys[layer_idx].flatten().tolist()
        kept = snapshot.kept_indices[layer_idx].tolist()
        found = layers[layer_idx]
        assert found.keys() == {"keys", "values", "kept_indices"}
        assert found["keys"] == ("F32", [num_entries, 4], struct.pack("<44f", *keys))
        assert found["kept_indices"] == ("U16", [num_entries], struct.pack("<11H", *kept))


@pytest.mark.parametrize(("dtype", "element_bytes"), [("float32", 4), ("bfloat16", 2)])
def test_the_exact_bytes_exceed_those_of_keys_and_values_by_less_than_two_percent(
    dtype: str, element_bytes: int
) -> None:
    identity = large_identity(dtype)
    size = len(encode_snapshot(large_snapshot(identity), identity))
    kv_bytes = 30 * 3 * 512 * 64 * 2 * element_bytes
    payload = kv_bytes + 30 * 3 * 512 * 2 + 576 * element_bytes
    assert payload < size < payload + 16_384
    assert size <= 1.02 * kv_bytes


@pytest.mark.parametrize(("num_prompt_tokens", "index_bytes"), [(65_536, 2), (65_537, 4)])
def test_positions_take_two_bytes_as_long_as_all_fit(
    num_prompt_tokens: int, index_bytes: int
) -> None:
    identity = new_identity(num_layers=1, num_kv_heads=1)
    snapshot = new_snapshot(identity, [[100]], num_prompt_tokens=num_prompt_tokens)
    assert snapshot.kept_indices is not None
    snapshot.kept_indices[0][-1] = num_prompt_tokens - 1
    blob = encode_snapshot(snapshot, identity)
    assert len(read_document(take_apart(blob).documents[1])["kept_indices"][2]) == 100 * index_bytes
    assert_same(decode_snapshot(blob, identity), snapshot)


@pytest.mark.parametrize("body", ["exact", "int8"])
def test_neither_way_holds_the_bytes_twice(body: Any) -> None:
    """What Python allocates; the library's own copy is of one layer, and not seen from here."""
    identity = large_identity("float32")
    snapshot = large_snapshot(identity)
    num_bytes = len(encode_snapshot(snapshot, identity, body=body))
    tracemalloc.start()
    try:
        blob = encode_snapshot(snapshot, identity, body=body)
        _, while_encoding = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        found = decode_snapshot(blob, identity)
        _, while_decoding = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # The buffer has room for an eighth more, and a thirtieth is a layer.
    assert while_encoding < 1.25 * num_bytes
    assert while_decoding < 2.15 * num_bytes  # the bytes themselves counted in
    assert found.num_prompt_tokens == 6_000


def test_an_unknown_body_is_refused() -> None:
    identity = new_identity()
    unknown: Any = "int4"
    with pytest.raises(InvalidParameterError, match="body: must be one of exact, int8"):
        encode_snapshot(new_snapshot(identity, RAGGED), identity, body=unknown)


@pytest.mark.parametrize(("wanted", "written"), [("exact", "int8"), ("int8", "exact")])
def test_a_reader_may_insist_on_a_body(wanted: Any, written: Any) -> None:
    identity = new_identity()
    blob = encode_snapshot(new_snapshot(identity, RAGGED), identity, body=written)
    with pytest.raises(SnapshotError, match=f"body: has {written}, wanted {wanted}"):
        decode_snapshot(blob, identity, body=wanted)
    decode_snapshot(blob, identity, body=written)


@pytest.mark.parametrize("body", ["exact", "int8"])
def test_what_version_1_wrote_is_read_for_ever(body: str) -> None:
    """Bytes that were written once and kept; whoever breaks this needs a new format version."""
    identity = new_identity(dtype="bfloat16", num_kv_heads=2, head_dim=2, hidden_size=3)
    blob = bytes.fromhex((GOLDEN / f"snapshot_v1_{body}.hex").read_text())
    found = decode_snapshot(blob, identity)
    # All are multiples of their channel's largest number over 127, so int8 holds them exactly.
    assert [keys.tolist() for keys in found.keys] == [
        [[1.0, -127.0], [-127.0, 64.0], [63.5, 0.0]],
        [[127.0, 2.0], [3.0, 254.0], [0.0, 0.0], [-127.0, 127.0]],
    ]
    assert [values.tolist() for values in found.values] == [
        [[0.5, 63.5], [63.5, -1.0], [-127.0, 12.0]],
        [[254.0, 127.0], [-2.0, 100.0], [127.0, 31.75], [1.0, 0.25]],
    ]
    assert found.kv_lens.tolist() == [[2, 1], [2, 2]]
    assert found.kept_indices is not None
    assert [kept.tolist() for kept in found.kept_indices] == [[3, 11, 11], [0, 11, 10, 11]]
    assert found.last_hidden.tolist() == [1.5, -2.0, 0.15625]
    assert found.num_prompt_tokens == 12
    assert found.kept_attention_mass == 0.625
