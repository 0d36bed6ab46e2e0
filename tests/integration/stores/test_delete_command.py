"""`snapkv snapshots delete` against a real Redis and an S3: one tenant's go, all of them."""

from pathlib import Path

import pytest

from app.services.access import namespace_of
from tests.support.command import Command
from tests.support.redis_server import RedisServer
from tests.support.served import free_port
from tests.support.stores import BUCKET, blob_of, key_of, s3_store, valkey_store

pytestmark = pytest.mark.slow

DOOMED = namespace_of("doomed")


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Command:
    monkeypatch.chdir(tmp_path)
    return Command(monkeypatch, capsys)


def test_it_removes_one_tenants_from_every_store(
    command: Command, monkeypatch: pytest.MonkeyPatch, redis: RedisServer, s3_url: str
) -> None:
    with valkey_store(redis.url) as valkey, s3_store(monkeypatch, s3_url) as s3:
        for number in range(3):
            for store in (valkey, s3):
                store.put(DOOMED, key_of(number), blob_of(1_000))
        valkey.put("kept", key_of(0), blob_of(10))
        monkeypatch.setenv("SNAPKV_SNAPSHOT_VALKEY_URL", redis.url)
        monkeypatch.setenv("SNAPKV_SNAPSHOT_S3_URL", f"s3://{BUCKET}/kv/v1")
        found = command("snapshots", "delete", "doomed")
        assert found == (0, "removed 6 copies of snapshots of doomed\n", "")
        assert command("snapshots", "delete", "doomed")[1].startswith("removed 0 ")
        assert valkey.get(DOOMED, key_of(0)) is None
        assert s3.get(DOOMED, key_of(0)) is None
        assert valkey.get("kept", key_of(0)) == blob_of(10)


def test_a_store_that_is_away_is_named_and_the_other_is_emptied(
    command: Command, monkeypatch: pytest.MonkeyPatch, redis: RedisServer
) -> None:
    with valkey_store(redis.url) as valkey:
        valkey.put(DOOMED, key_of(0), blob_of(10))
        monkeypatch.setenv("SNAPKV_SNAPSHOT_VALKEY_URL", redis.url)
        monkeypatch.setenv("SNAPKV_SNAPSHOT_S3_URL", "s3://nowhere/kv")
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        monkeypatch.setenv("AWS_REGION", "eu-west-3")
        status, out, err = command("snapshots", "delete", "doomed")
        assert (status, out) == (1, "")
        assert "blobs may be left in s3" in err
        assert valkey.get(DOOMED, key_of(0)) is None


@pytest.mark.parametrize("name", ["", "a:b", "*", "a" * 65, "a b"])
def test_what_is_no_name_is_refused(command: Command, name: str) -> None:
    status, _, err = command("snapshots", "delete", name)
    assert status == 2
    assert "no name of a key" in err


def test_without_a_store_over_a_network_there_is_nothing_to_do(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SNAPKV_SNAPSHOT_MEMORY_BYTES", "1000")
    status, _, err = command("snapshots", "delete", "default")
    assert status == 2
    assert "SNAPKV_SNAPSHOT_VALKEY_URL" in err
