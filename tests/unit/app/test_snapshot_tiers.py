"""Which stores the settings open, and what of them is refused with the name of the variable."""

from pathlib import Path
from typing import Any

import pytest

from app.integrations.snapshot_tiers import open_snapshot_tiers
from app.settings import SettingsError, load_settings
from snapkv_core import SnapshotPolicy, StoreError
from tests.support.app_client import settings_for_tests
from tests.support.served import free_port

KEY = "a" * 64


class Told:
    """Notes which stores failed."""

    def __init__(self) -> None:
        self.stores: list[str] = []

    def __call__(self, store: str, error: StoreError) -> None:
        """Note one."""
        self.stores.append(f"{store}: {type(error).__name__}")


def test_no_store_is_named_by_default() -> None:
    assert open_snapshot_tiers(settings_for_tests(), Told()) is None
    assert settings_for_tests().snapshot_policy() == SnapshotPolicy()


def test_memory_is_kept_to_its_bytes() -> None:
    store = open_snapshot_tiers(settings_for_tests(snapshot_memory_bytes=10), Told())
    assert store is not None
    store.put("t", KEY, b"0123456789")
    assert store.get("t", KEY) == b"0123456789"
    store.put("t", KEY, b"0123456789a")
    assert store.get("t", KEY) is None
    store.close()


def test_memory_answers_whatever_the_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the others is left alone by itself after three failures."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "eu-west-3")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    told = Told()
    settings = settings_for_tests(
        snapshot_memory_bytes=1_000,
        snapshot_valkey_url=f"valkey://127.0.0.1:{free_port()}",
        snapshot_s3_url="s3://bucket/kv",
    )
    store = open_snapshot_tiers(settings, told)
    assert store is not None
    for _ in range(4):
        assert store.get("t", KEY) is None
    assert told.stores[:6] == ["valkey: StoreError", "s3: StoreError"] * 3
    assert told.stores[6:] == ["valkey: StoreHeldBackError", "s3: StoreHeldBackError"]
    store.put("t", KEY, b"blob")
    assert store.get("t", KEY) == b"blob"
    store.close()


def test_policy_is_that_of_the_settings() -> None:
    settings = settings_for_tests(
        snapshot_body="INT8",
        snapshot_min_prompt_tokens=7,
        snapshot_max_bytes=8,
        snapshot_lookup_timeout_ms=90,
        snapshot_write_bytes_per_s=10_000,
    )
    assert settings.snapshot_policy() == SnapshotPolicy("int8", 7, 8, 0.09, 10_000)


VALKEY = {"snapshot_valkey_url": "valkeys://127.0.0.1:1"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"snapshot_valkey_url": "http://user:hunter2@host"}, r"VALKEY_URL: must begin with"),
        ({"snapshot_valkey_url": "valkey://:1"}, r"VALKEY_URL: names no host"),
        ({"snapshot_valkey_cluster": True}, r"CLUSTER: needs SNAPKV_SNAPSHOT_VALKEY_URL"),
        ({"snapshot_valkey_ca_file": "a.pem"}, r"CA_FILE: needs SNAPKV_SNAPSHOT_VALKEY_URL"),
        ({**VALKEY, "snapshot_valkey_ca_file": "/nowhere.pem"}, r"CA_FILE: is no file"),
        (
            {"snapshot_valkey_url": "valkey://h", "snapshot_valkey_ca_file": "/etc/hostname"},
            r"CA_FILE: is for TLS",
        ),
        ({**VALKEY, "snapshot_elasticache_name": "c"}, r"NAME: needs \S+ELASTICACHE_USER"),
        ({**VALKEY, "snapshot_elasticache_user": "u"}, r"USER: needs \S+ELASTICACHE_NAME"),
        ({"snapshot_elasticache_serverless": True}, r"SERVERLESS: needs \S+ELASTICACHE_NAME"),
        (
            {
                "snapshot_valkey_url": "valkey://h",
                "snapshot_elasticache_name": "c",
                "snapshot_elasticache_user": "u",
            },
            r"ELASTICACHE_NAME: needs TLS",
        ),
        ({"snapshot_s3_kms_key_id": "k"}, r"KMS_KEY_ID: needs SNAPKV_SNAPSHOT_S3_URL"),
        ({"snapshot_s3_url": "bucket/prefix"}, r"SNAPKV_SNAPSHOT_S3_URL: must be s3://"),
        ({"snapshot_s3_url": "s3://b/../x"}, r"SNAPKV_SNAPSHOT_S3_URL: "),
    ],
)
def test_what_is_not_acceptable_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message) as caught:
        open_snapshot_tiers(settings_for_tests(**given), Told())
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SNAPKV_SNAPSHOT_MEMORY_BYTES", "-1"),
        ("SNAPKV_SNAPSHOT_MEMORY_BYTES", "1GB"),
        ("SNAPKV_SNAPSHOT_TTL_S", "0"),
        ("SNAPKV_SNAPSHOT_BODY", "int4"),
        ("SNAPKV_SNAPSHOT_MIN_PROMPT_TOKENS", "0"),
        ("SNAPKV_SNAPSHOT_LOOKUP_TIMEOUT_MS", "0"),
        ("SNAPKV_SNAPSHOT_LOOKUP_TIMEOUT_MS", "60001"),
        ("SNAPKV_SNAPSHOT_WRITE_BYTES_PER_S", "0"),
    ],
)
def test_values_out_of_range_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, value: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=name):
        load_settings(env_file=None)
