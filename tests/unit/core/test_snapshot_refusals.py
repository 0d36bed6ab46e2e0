"""Bytes that are not the snapshot that is wanted are a `SnapshotError`, and never anything else."""

import json
import random
import re
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from snapkv_core import SnapshotError
from snapkv_core.kv_cache.snapshot import PromptSnapshot, SnapshotIdentity, check_snapshot
from snapkv_core.kv_cache.snapshot_codec import decode_snapshot, encode_snapshot
from tests.oracles.snapshot_bytes import (
    CHECKSUM_BYTES,
    Document,
    SnapshotParts,
    read_document,
    signed,
    take_apart,
    write_document,
)
from tests.support.snapshots import (
    RAGGED,
    assert_same,
    new_identity,
    new_snapshot,
    other_identities,
)

IDENTITY = new_identity()
SNAPSHOT = new_snapshot(IDENTITY, RAGGED)
BLOBS: dict[Any, bytes] = {
    body: encode_snapshot(SNAPSHOT, IDENTITY, body=body) for body in ("exact", "int8")
}
EXACT = BLOBS["exact"]

Change = Callable[[SnapshotParts], object]


def refusal(blob: bytes, identity: SnapshotIdentity = IDENTITY) -> str:
    """Return why bytes are refused."""
    with pytest.raises(SnapshotError) as caught:
        decode_snapshot(blob, identity)
    return str(caught.value)


def forged(change: Change, blob: bytes = EXACT) -> bytes:
    """Change something and put a checksum that fits under it."""
    parts = take_apart(blob)
    change(parts)
    return parts.joined()


def members(**changes: Any) -> Change:
    """Change members of the header."""
    return lambda parts: parts.set_members(**changes)


def identity_members(**changes: Any) -> Change:
    """Change members of the identity within the header."""
    return lambda parts: parts.set_members(identity=parts.members["identity"] | changes)


def document(idx: int, edit: Callable[[Document], object]) -> Change:
    """Change the tensors of a document."""

    def change(parts: SnapshotParts) -> None:
        tensors = read_document(parts.documents[idx])
        edit(tensors)
        parts.documents[idx] = write_document(tensors)

    return change


def positions(*places: int) -> Change:
    """Write other positions into the second layer, whose KV heads keep 4, 5 and 2 tokens."""
    kept = ("U16", [11], struct.pack("<11H", *places))
    return document(2, lambda tensors: tensors.update(kept_indices=kept))


def test_putting_together_what_was_taken_apart_changes_nothing() -> None:
    """So that what the other tests see is due to what they change."""
    assert forged(lambda _: None) == EXACT
    rewritten = forged(document(1, lambda _: None))
    assert_same(decode_snapshot(rewritten, IDENTITY), SNAPSHOT)


@pytest.mark.parametrize("name", other_identities())
def test_a_snapshot_of_another_identity_is_refused_by_the_name_of_what_differs(name: str) -> None:
    assert re.match(
        rf"{re.escape(name)}: has .*, wanted ", refusal(EXACT, other_identities()[name])
    )


@pytest.mark.parametrize("body", BLOBS)
def test_a_flip_of_any_byte_is_refused(body: str) -> None:
    blob, mask = BLOBS[body], random.Random(1)
    for place in range(len(blob)):
        for flip in (0x01, 0x80, mask.randrange(1, 256)):
            changed = bytearray(blob)
            changed[place] ^= flip
            refusal(bytes(changed))


@pytest.mark.parametrize("body", BLOBS)
def test_any_truncation_is_refused(body: str) -> None:
    for length in range(len(BLOBS[body])):
        refusal(BLOBS[body][:length])


def test_bytes_that_are_added_lost_or_moved_are_refused() -> None:
    chance = random.Random(2)
    for _ in range(500):
        start, end = sorted(chance.sample(range(len(EXACT) + 1), 2))
        cut = EXACT[start:end]
        assert EXACT[:start] + cut + EXACT[end:] == EXACT
        refusal(EXACT[:start] + EXACT[end:])
        refusal(EXACT[:end] + cut + EXACT[end:])
        if cut != cut[::-1]:
            refusal(EXACT[:start] + cut[::-1] + EXACT[end:])


@given(st.binary(max_size=300))
@example(b"")
@example(EXACT[:16])
@settings(max_examples=200, deadline=None)
def test_bytes_of_any_kind_are_refused(blob: bytes) -> None:
    refusal(blob)
    refusal(EXACT[:16] + blob)
    refusal(signed(EXACT[:16] + blob))


@pytest.mark.parametrize("body", BLOBS)
def test_changes_under_a_checksum_that_fits_are_refused_or_give_a_whole_snapshot(body: str) -> None:
    """No writer makes such bytes; whoever does must not get another exception out of a reader."""
    chance = random.Random(3)
    outcomes = {"refused": 0, "read": 0}
    for _ in range(3_000):
        covered = bytearray(BLOBS[body][:-CHECKSUM_BYTES])
        for _ in range(chance.choice([1, 1, 2, 8])):
            covered[chance.randrange(len(covered))] = chance.randrange(256)
        try:
            found = decode_snapshot(signed(bytes(covered)), IDENTITY)
        except SnapshotError:
            outcomes["refused"] += 1
        else:
            check_snapshot(found, IDENTITY)
            outcomes["read"] += 1
    assert min(outcomes.values()) > 100


def test_nothing_is_parsed_before_the_checksum_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(*_: Any, **__: Any) -> Any:
        raise AssertionError("parsed")

    monkeypatch.setattr(json, "loads", parse)
    monkeypatch.setattr(safetensors.torch, "load", parse)
    assert refusal(EXACT[:-1] + bytes([EXACT[-1] ^ 1])).startswith("checksum: ")
    assert refusal(EXACT + b"\0").startswith("checksum: ")
    with pytest.raises(AssertionError, match="parsed"):
        decode_snapshot(EXACT, IDENTITY)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda parts: setattr(parts, "magic", b"\x89SNAPKV\r"), "magic: "),
        (lambda parts: setattr(parts, "version", 2), "format version: has 2, wanted 1"),
        (lambda parts: setattr(parts, "version", 0), "format version: has 0, wanted 1"),
        (lambda parts: setattr(parts, "header", b""), "header: not JSON"),
        (lambda parts: setattr(parts, "header", b"[]"), "header: its members are not"),
        (lambda parts: setattr(parts, "header", b"[" * 100_000), "header: not JSON"),
        (lambda parts: setattr(parts, "header", b"9" * 5_000), "header: not JSON"),
        (lambda parts: setattr(parts, "header", b"NaN"), "header: not JSON"),
        (lambda parts: setattr(parts, "header", b"\xff\xfe"), "header: not JSON"),
        (lambda parts: setattr(parts, "header", b" " + parts.header), "header: not JSON"),
        (
            lambda parts: setattr(parts, "header", b'{"body":"int8",' + parts.header[1:]),
            "header: not JSON",
        ),
        (members(note="more"), "header: its members are not"),
        (members(kv_lens=None), "header: its members are not"),
        (members(identity="demo"), "identity: its members are not"),
        (identity_members(vocab_size=9), "identity: its members are not"),
        (identity_members(num_layers=True), "num_layers: has True, wanted 2"),
        (identity_members(num_layers=2.0), "num_layers: has float, wanted 2"),
        (identity_members(head_dim=[4]), "head_dim: has list, wanted 4"),
        (members(body="int4"), "body: must be one of exact, int8"),
        (members(body=[]), "body: must be one of exact, int8"),
        (members(num_prompt_tokens=2**62), "num_prompt_tokens: "),
        (members(num_prompt_tokens=0), "num_prompt_tokens: "),
        (members(num_prompt_tokens=True), "num_prompt_tokens: "),
        (members(num_prompt_tokens="12"), "num_prompt_tokens: "),
        (members(num_prompt_tokens=6), "kv_lens: must be 1 to the prompt's 6 tokens"),
        (members(has_kept_indices=1), "has_kept_indices: "),
        (members(kept_attention_mass=1), "kept_attention_mass: "),
        (members(kept_attention_mass=-0.5), "kept_attention_mass: "),
        (members(kv_lens=7), "kv_lens: must be 2 rows of 3 numbers"),
        (members(kv_lens=RAGGED[:1]), "kv_lens: must be 2 rows of 3 numbers"),
        (members(kv_lens=[[3, 1], [4, 5]]), "kv_lens: must be 2 rows of 3 numbers"),
        (members(kv_lens=[[3, 1, 0], [4, 5, 2]]), "kv_lens: must be 1 to"),
        (members(kv_lens=[[3, True, 7], [4, 5, 2]]), "kv_lens: must be 1 to"),
        (members(kv_lens=[[3, 1.0, 7], [4, 5, 2]]), "kv_lens: must be 1 to"),
        (members(kv_lens=[[3, 10**30, 7], [4, 5, 2]]), "kv_lens: must be 1 to"),
        (
            members(kv_lens=[[2**31 - 1] * 3] * 2, num_prompt_tokens=2**31 - 1),
            "layer 0, keys: has torch.float32 [11, 4], wanted torch.float32 [6442450941, 4]",
        ),
        (members(kv_lens=[[3, 1, 7], [4, 5, 3]]), "layer 1, keys: has torch.float32 [11, 4]"),
        (lambda parts: parts.documents.pop(), "documents: wanted 3"),
        (lambda parts: parts.documents.append(b""), "documents: wanted 3"),
        (lambda parts: parts.documents.append(parts.documents[2]), "documents: wanted 3"),
        (
            lambda parts: parts.documents.reverse(),
            "prompt: its tensors are not last_hidden",
        ),
        (
            lambda parts: parts.documents.__setitem__(1, b""),
            "layer 0: not a safetensors document",
        ),
        (
            lambda parts: parts.documents.__setitem__(1, b"\xff" * 8 + b"{}"),
            "layer 0: not a safetensors document",
        ),
        (
            document(0, lambda one: one.update(last_hidden=("F32", [4], bytes(16)))),
            "prompt, last_hidden: has torch.float32 [4], wanted torch.float32 [5]",
        ),
        (document(1, lambda one: one.pop("values")), "layer 0: its tensors are not"),
        (
            document(1, lambda one: one.update(more=("F32", [1], bytes(4)))),
            "layer 0: its tensors are not",
        ),
        (
            document(2, lambda one: one.update(values=("F16", [11, 4], bytes(88)))),
            "layer 1, values: has torch.float16 [11, 4], wanted torch.float32 [11, 4]",
        ),
        (
            document(1, lambda one: one.update(keys=("F32", [4, 11], bytes(176)))),
            "layer 0, keys: has torch.float32 [4, 11], wanted torch.float32 [11, 4]",
        ),
        (
            document(1, lambda one: one.update(kept_indices=("I32", [11], bytes(44)))),
            "layer 0, kept_indices: has torch.int32",
        ),
        (
            document(1, lambda one: one.update(keys=("F99", [11, 4], bytes(176)))),
            "layer 0: not a safetensors document",
        ),
        (
            document(1, lambda one: one.update(keys=("F32", [2**40, 2**20], bytes(176)))),
            "layer 0: not a safetensors document",
        ),
        (positions(0, 1, 2, 3, 0, 1, 2, 3, 12, 0, 1), "kept_indices of layer 1: a position lies"),
        (positions(0, 1, 2, 2, 0, 1, 2, 3, 4, 0, 1), "kept_indices of layer 1: positions of a KV"),
        (positions(0, 1, 2, 3, 0, 1, 2, 3, 4, 9, 1), "kept_indices of layer 1: positions of a KV"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: Change, reason: str) -> None:
    assert refusal(forged(change)).startswith(reason)


def test_a_header_or_document_longer_than_everything_is_refused() -> None:
    covered = EXACT[:-CHECKSUM_BYTES]
    petabytes = struct.pack("<Q", 1 << 53)
    (num_header_bytes,) = struct.unpack("<I", covered[12:16])
    end = 16 + num_header_bytes
    assert "header: " in refusal(signed(covered[:12] + b"\xff" * 4 + covered[16:]))
    assert "document 0: " in refusal(signed(covered[:end] + petabytes + covered[end + 8 :]))


def test_bytes_behind_the_last_document_are_refused() -> None:
    for num_bytes in (1, 7, 8, 100):
        assert "documents: " in refusal(signed(EXACT[:-CHECKSUM_BYTES] + bytes(num_bytes)))


def test_positions_that_are_left_out_are_missed() -> None:
    def leave_out(parts: SnapshotParts) -> None:
        parts.set_members(has_kept_indices=False)
        for idx in (1, 2):
            document(idx, lambda tensors: tensors.pop("kept_indices"))(parts)

    assert refusal(forged(leave_out)).startswith("kept_indices: missing")


@pytest.mark.parametrize(
    ("name", "tensor", "reason"),
    [
        ("keys", ("F32", [11, 4], bytes(176)), "layer 0, keys: has torch.float32 [11, 4]"),
        ("keys_scales", ("F32", [4, 3], bytes(48)), "layer 0, keys_scales: has torch.float32"),
        ("values_scales", ("F16", [3, 4], bytes(24)), "layer 0, values_scales: has torch.float16"),
    ],
)
def test_codes_and_scales_of_another_kind_are_refused(
    name: str, tensor: tuple[str, list[int], bytes], reason: str
) -> None:
    change = document(1, lambda tensors: tensors.update({name: tensor}))
    assert refusal(forged(change, BLOBS["int8"])).startswith(reason)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"keys": SNAPSHOT.keys[:1]}, "keys: has 1 layers, wanted 2"),
        ({"values": SNAPSHOT.keys[::-1] + SNAPSHOT.keys}, "values: has 4 layers, wanted 2"),
        ({"keys": tuple(k.half() for k in SNAPSHOT.keys)}, "keys of layer 0: has torch.float16"),
        ({"values": tuple(v[1:] for v in SNAPSHOT.values)}, "values of layer 0: has torch.float32"),
        ({"kv_lens": SNAPSHOT.kv_lens.long()}, "kv_lens: has torch.int64"),
        ({"kv_lens": SNAPSHOT.kv_lens.T}, "kv_lens: has torch.int32 [3, 2]"),
        ({"kv_lens": SNAPSHOT.kv_lens * 0}, "kv_lens: must be 1 to"),
        ({"kept_indices": None}, "kept_indices: missing"),
        ({"last_hidden": SNAPSHOT.last_hidden.double()}, "last_hidden: has torch.float64"),
        ({"last_hidden": SNAPSHOT.last_hidden[None]}, "last_hidden: has torch.float32 [1, 5]"),
        ({"num_prompt_tokens": 0}, "num_prompt_tokens: "),
        ({"num_prompt_tokens": 6}, "kv_lens: must be 1 to the prompt's 6 tokens"),
        ({"num_prompt_tokens": 2**31}, "num_prompt_tokens: "),
        ({"kept_attention_mass": float("nan")}, "kept_attention_mass: "),
        ({"kept_attention_mass": float("inf")}, "kept_attention_mass: "),
    ],
)
def test_a_snapshot_that_does_not_fit_is_not_written(changes: dict[str, Any], reason: str) -> None:
    wrong: PromptSnapshot = replace(SNAPSHOT, **changes)
    with pytest.raises(SnapshotError) as caught:
        encode_snapshot(wrong, IDENTITY)
    assert str(caught.value).startswith(reason)


def test_positions_outside_the_prompt_are_not_written() -> None:
    assert SNAPSHOT.kept_indices is not None
    for place in (-1, 12):
        kept = tuple(torch.full_like(one, place) for one in SNAPSHOT.kept_indices)
        with pytest.raises(SnapshotError, match="kept_indices of layer 0: a position lies"):
            encode_snapshot(replace(SNAPSHOT, kept_indices=kept), IDENTITY)
