"""Snapshots of prompts that nobody read: any shape, random numbers."""

import random
from dataclasses import fields, replace
from typing import Any, Final

import torch
from torch import Tensor

from snapkv_core import CompressionConfig
from snapkv_core.kv_cache.snapshot import (
    KV_DTYPES,
    PromptSnapshot,
    SnapshotIdentity,
    digest_of,
)

#: Kept tokens of two layers with three KV heads each, all different.
RAGGED: Final = [[3, 1, 7], [4, 5, 2]]

_IDENTITY: Final = SnapshotIdentity(
    model_fingerprint="f" * 64,
    dtype="float32",
    compression=CompressionConfig("snapkv", 6, 2, 3, "avg"),
    token_ids_digest=digest_of([7, 8, 9]),
    num_layers=2,
    num_kv_heads=3,
    head_dim=4,
    hidden_size=5,
)


def new_identity(**values: Any) -> SnapshotIdentity:
    """Return an identity that `RAGGED` lengths fit, with other values."""
    return replace(_IDENTITY, **values)


def other_identities() -> dict[str, SnapshotIdentity]:
    """Return identities that differ from `new_identity()` in one field each, by its name."""
    others = {
        "model_fingerprint": "0" * 64,
        "dtype": "float16",
        "token_ids_digest": digest_of([7, 8]),
        "num_layers": 3,
        "num_kv_heads": 2,
        "head_dim": 5,
        "hidden_size": 4,
    }
    knobs = {
        "method": "full",
        "max_capacity_prompt": 7,
        "window_size": 3,
        "kernel_size": 5,
        "pooling": "max",
    }
    identities = {name: new_identity(**{name: value}) for name, value in others.items()}
    for name, value in knobs.items():
        compression = replace(_IDENTITY.compression, **{name: value})  # type: ignore[arg-type]
        identities[f"compression.{name}"] = new_identity(compression=compression)
    return identities


def new_snapshot(
    identity: SnapshotIdentity,
    kv_lens: list[list[int]],
    *,
    num_prompt_tokens: int = 12,
    keeps_all: bool = False,
    seed: int = 0,
) -> PromptSnapshot:
    """Draw a snapshot; with `keeps_all` it has no positions."""
    noise, positions = torch.Generator().manual_seed(seed), random.Random(seed)
    dtype = KV_DTYPES[identity.dtype]

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=noise).to(dtype)

    def choose(lens: list[int]) -> Tensor:
        heads = [sorted(positions.sample(range(num_prompt_tokens), num)) for num in lens]
        return torch.tensor([place for head in heads for place in head], dtype=torch.int32)

    return PromptSnapshot(
        keys=tuple(draw(sum(lens), identity.head_dim) for lens in kv_lens),
        values=tuple(draw(sum(lens), identity.head_dim) for lens in kv_lens),
        kv_lens=torch.tensor(kv_lens, dtype=torch.int32),
        kept_indices=None if keeps_all else tuple(choose(lens) for lens in kv_lens),
        last_hidden=draw(identity.hidden_size),
        num_prompt_tokens=num_prompt_tokens,
        kept_attention_mass=0.8125,
    )


def assert_same(found: PromptSnapshot, expected: PromptSnapshot) -> None:
    """Compare two snapshots to the last bit, so that a NaN equals itself."""
    for field in fields(PromptSnapshot):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        assert type(one) is type(other), field.name
        if isinstance(one, Tensor):
            one, other = (one,), (other,)
        if isinstance(one, tuple):
            assert [bits_of(part) for part in one] == [bits_of(part) for part in other], field.name
        else:
            assert one == other, field.name


def bits_of(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    """Return all there is to a tensor."""
    as_bytes = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return tensor.dtype, tuple(tensor.shape), as_bytes
