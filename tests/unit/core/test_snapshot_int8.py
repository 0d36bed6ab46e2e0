"""Keys and values in 8 bits are near the originals, channel by channel; all else is exact."""

from dataclasses import replace

import pytest
import torch

from snapkv_core import CompressionConfig, SnapshotError
from snapkv_core.kv_cache.snapshot import KV_DTYPES, PromptSnapshot, SnapshotIdentity
from snapkv_core.kv_cache.snapshot_codec import decode_snapshot, encode_snapshot
from tests.oracles.snapshot_bytes import read_document, take_apart
from tests.support.snapshots import RAGGED, assert_same, new_identity, new_snapshot


def through_int8(snapshot: PromptSnapshot, identity: SnapshotIdentity) -> PromptSnapshot:
    """Write and read a snapshot."""
    return decode_snapshot(encode_snapshot(snapshot, identity, body="int8"), identity)


def heads_of(layer: torch.Tensor, lens: list[int]) -> list[list[list[float]]]:
    """Return a layer's entries by KV head and channel."""
    entries, heads = layer.double().tolist(), []
    for num in lens:
        head, entries = entries[:num], entries[num:]
        heads.append([list(channel) for channel in zip(*head, strict=True)])
    return heads


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_an_error_is_at_most_half_a_step_of_its_channel(dtype: str, seed: int) -> None:
    lens = [[30, 7, 1], [12, 40, 3]]
    identity = new_identity(dtype=dtype)
    snapshot = new_snapshot(identity, lens, num_prompt_tokens=50, seed=seed)
    # Channels of very different size, as keys have them.
    for layer in (*snapshot.keys, *snapshot.values):
        layer.mul_(torch.tensor([1e-3, 1.0, 8.0, 200.0]))
    found = through_int8(snapshot, identity)
    rounding = torch.finfo(KV_DTYPES[dtype]).eps
    for name in ("keys", "values"):
        pairs = zip(getattr(found, name), getattr(snapshot, name), lens, strict=True)
        for ours, theirs, layer_lens in pairs:
            for near, exact in zip(
                heads_of(ours, layer_lens), heads_of(theirs, layer_lens), strict=True
            ):
                for near_channel, channel in zip(near, exact, strict=True):
                    largest = max(map(abs, channel))
                    bound = largest / 254 * (1 + 1e-6) + largest * rounding
                    errors = [abs(a - b) for a, b in zip(near_channel, channel, strict=True)]
                    assert max(errors) <= bound


def test_all_but_keys_and_values_is_exact() -> None:
    identity = new_identity()
    snapshot = new_snapshot(identity, RAGGED)
    found = through_int8(snapshot, identity)
    assert not torch.equal(found.keys[0], snapshot.keys[0])
    assert_same(replace(found, keys=snapshot.keys, values=snapshot.values), snapshot)


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_what_is_read_has_the_number_format_of_the_pool(dtype: str) -> None:
    identity = new_identity(dtype=dtype)
    found = through_int8(new_snapshot(identity, RAGGED), identity)
    assert {tensor.dtype for tensor in (*found.keys, *found.values)} == {KV_DTYPES[dtype]}


def test_a_loud_channel_costs_the_others_nothing() -> None:
    """With one scale per head, entries below 1,000 / 254 would all become zero."""
    identity = new_identity(num_layers=1, num_kv_heads=1)
    snapshot = new_snapshot(identity, [[10]])
    snapshot.keys[0][:, 2] *= 1_000
    found = through_int8(snapshot, identity)
    quiet = [0, 1, 3]
    torch.testing.assert_close(
        found.keys[0][:, quiet], snapshot.keys[0][:, quiet], atol=0.02, rtol=0
    )


def test_zeros_stay_zeros() -> None:
    identity = new_identity()
    snapshot = new_snapshot(identity, RAGGED)
    for layer in (*snapshot.keys, *snapshot.values):
        layer[:, 1] = 0.0
    found = through_int8(snapshot, identity)
    assert all((layer[:, 1] == 0).all() for layer in (*found.keys, *found.values))
    assert all(layer.isfinite().all() for layer in (*found.keys, *found.values))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_largest_numbers_of_a_format_stay_finite(dtype: str) -> None:
    identity = new_identity(dtype=dtype)
    snapshot = new_snapshot(identity, RAGGED)
    largest = torch.finfo(KV_DTYPES[dtype]).max
    snapshot.keys[0][0] = torch.tensor([largest, -largest, largest, 0.0])
    found = through_int8(snapshot, identity)
    assert found.keys[0].isfinite().all()
    assert found.keys[0][0].tolist() == pytest.approx([largest, -largest, largest, 0.0])


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["keys", "values"])
def test_a_number_that_is_none_is_refused(name: str, odd: float) -> None:
    identity = new_identity()
    snapshot = new_snapshot(identity, RAGGED)
    getattr(snapshot, name)[1][2, 3] = odd
    with pytest.raises(SnapshotError, match=f"^{name} of layer 1: .* not finite"):
        encode_snapshot(snapshot, identity, body="int8")


def test_it_is_little_more_than_half_of_a_bfloat16_cache() -> None:
    identity = new_identity(
        dtype="bfloat16",
        compression=CompressionConfig("snapkv", 512, 16, 15, "max"),
        num_layers=30,
        head_dim=64,
        hidden_size=576,
    )
    snapshot = new_snapshot(identity, [[512] * 3] * 30, num_prompt_tokens=6_000)
    size = len(encode_snapshot(snapshot, identity, body="int8"))
    codes_bytes = 30 * 3 * 512 * 64 * 2
    positions_bytes = 30 * 3 * 512 * 2
    scales_bytes = 30 * 3 * 64 * 2 * 4
    payload = codes_bytes + positions_bytes + scales_bytes + 576 * 2
    assert payload < size < payload + 20_000
    assert size <= 0.52 * 2 * codes_bytes


def test_a_layer_holds_codes_and_scales() -> None:
    identity = new_identity()
    parts = take_apart(encode_snapshot(new_snapshot(identity, RAGGED), identity, body="int8"))
    assert parts.members["body"] == "int8"
    layer = read_document(parts.documents[1])
    kinds = {name: (dtype, shape) for name, (dtype, shape, _) in layer.items()}
    assert kinds == {
        "keys": ("I8", [11, 4]),
        "keys_scales": ("F32", [3, 4]),
        "values": ("I8", [11, 4]),
        "values_scales": ("F32", [3, 4]),
        "kept_indices": ("U16", [11]),
    }
