"""Whatever determines a snapshot determines its key."""

import hashlib
from dataclasses import fields

import pytest

from snapkv_core import CompressionConfig, InvalidParameterError
from snapkv_core.kv_cache import snapshot
from snapkv_core.kv_cache.snapshot import SnapshotIdentity, digest_of
from tests.support.snapshots import new_identity, other_identities


def test_the_identities_tried_differ_in_every_field_there_is() -> None:
    own = {field.name for field in fields(SnapshotIdentity)} - {"compression"}
    knobs = {f"compression.{field.name}" for field in fields(CompressionConfig)}
    assert other_identities().keys() == own | knobs


@pytest.mark.parametrize("name", other_identities())
def test_each_field_changes_the_key(name: str) -> None:
    assert other_identities()[name].key() != new_identity().key()


def test_no_two_of_them_have_the_same_key() -> None:
    keys = {identity.key() for identity in other_identities().values()}
    assert len(keys) == len(other_identities())


def test_the_same_fields_give_the_same_key() -> None:
    assert new_identity().key() == new_identity().key()


def test_the_key_is_the_hash_of_the_fields_as_json() -> None:
    """Written out here, so that a change which loses every stored snapshot does not go unseen."""
    text = (
        '{"compression.kernel_size":3,"compression.max_capacity_prompt":6,'
        '"compression.method":"snapkv","compression.pooling":"avg","compression.window_size":2,'
        '"dtype":"float32","format_version":1,"head_dim":4,"hidden_size":5,'
        f'"model_fingerprint":"{"f" * 64}","num_kv_heads":3,"num_layers":2,'
        f'"token_ids_digest":"{digest_of([7, 8, 9])}"}}'
    )
    assert new_identity().key() == hashlib.sha256(text.encode()).hexdigest()


def test_another_format_version_changes_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = new_identity().key()
    monkeypatch.setattr(snapshot, "SNAPSHOT_FORMAT_VERSION", 2)
    assert new_identity().key() != before


def test_token_ids_are_hashed_as_64_bits_each() -> None:
    expected = hashlib.sha256(b"\x01\0\0\0\0\0\0\0\x00\x01\0\0\0\0\0\0").hexdigest()
    assert digest_of([1, 256]) == expected
    assert digest_of([]) == hashlib.sha256(b"").hexdigest()


def test_an_unknown_number_format_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match="dtype: must be one of float32"):
        new_identity(dtype="int8")
