"""The Valkey store against a real server: what lies there, logins, TLS, and memory that is full."""

from pathlib import Path
from typing import Any

import pytest

from app.integrations.valkey import store as store_module
from app.integrations.valkey.exchange import exchange, fetch
from snapkv_core import KVStore, StoreError
from tests.support.certificates import write_tls_files
from tests.support.redis_server import (
    PASSWORD,
    USER,
    USERS,
    RedisServer,
    keys_in,
    redis_server,
)
from tests.support.served import free_port
from tests.support.stores import (
    CHUNK_BYTES,
    KEY,
    blob_of,
    key_of,
    tls_lines,
    user_url,
    valkey_store,
)

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def nothing_there(redis: RedisServer) -> None:
    """Begin with a server without keys."""
    with redis.client() as client:
        client.flushall()


def test_every_key_expires_and_the_manifest_first(redis: RedisServer) -> None:
    """Two whole chunks, one that is shorter, and a manifest."""
    with valkey_store(redis.url, ttl_s=600) as store:
        store.put("t", KEY, blob_of(2 * CHUNK_BYTES + 1))
    prefix = f"snapkv:{{t:{KEY}}}"
    ttls = keys_in(redis)
    assert list(ttls) == [f"{prefix}:{name}" for name in ("0", "1", "2", "m")]
    manifest_ttl_s = ttls.pop(f"{prefix}:m")
    assert 590 <= manifest_ttl_s <= 600
    assert all(manifest_ttl_s < ttl_s <= 660 for ttl_s in ttls.values())


def test_blob_is_gone_once_its_time_is_over(redis: RedisServer) -> None:
    """As the server counts it."""
    with valkey_store(redis.url) as store, redis.client() as client:
        store.put("t", KEY, b"blob")
        client.pexpire(f"snapkv:{{t:{KEY}}}:m", 1)
        while client.exists(f"snapkv:{{t:{KEY}}}:m"):
            pass
        assert store.get("t", KEY) is None


def test_what_one_process_puts_another_gets(redis: RedisServer) -> None:
    """Also with another size of chunks."""
    blob = blob_of(5 * CHUNK_BYTES + 7)
    with valkey_store(redis.url) as one, valkey_store(redis.url, chunk_bytes=4_096) as two:
        one.put("t", KEY, blob)
        assert two.get("t", KEY) == blob
        two.put("t", KEY, blob[::-1])
        assert one.get("t", KEY) == blob[::-1]


def test_blob_of_several_default_chunks(redis: RedisServer) -> None:
    """Eight MiB each."""
    blob = blob_of((16 << 20) + 3)
    with valkey_store(redis.url, chunk_bytes=8 << 20) as store:
        store.put("t", KEY, blob)
        assert store.get("t", KEY) == blob
    assert len(keys_in(redis)) == 4


def test_few_chunks_travel_at_once(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow server is not sent, nor asked for, a whole blob before it has answered."""
    trips: list[list[str]] = []

    def record_exchange(client: Any, commands: Any) -> list[Any]:
        trips.append([command[0] for command in commands])
        return exchange(client, commands)

    def record_fetch(client: Any, keys: list[str], values: list[memoryview]) -> bool:
        trips.append(["GET"] * len(keys))
        return fetch(client, keys, values)

    monkeypatch.setattr(store_module, "exchange", record_exchange)
    monkeypatch.setattr(store_module, "fetch", record_fetch)
    with valkey_store(redis.url, num_chunks_per_trip=3) as store:
        store.put("t", KEY, blob_of(7 * CHUNK_BYTES))
        store.get("t", KEY)
    put_trips = [["UNLINK", "SET", "SET", "SET"], ["SET"] * 3, ["SET"], ["SET"]]
    get_trips = [["GET"], ["GET"] * 3, ["GET"] * 3, ["GET"]]
    assert trips == put_trips + get_trips


def test_larger_blob_than_allowed_is_not_sent(redis: RedisServer) -> None:
    """Nor read, if another process put it."""
    with valkey_store(redis.url) as large, valkey_store(redis.url, max_blob_bytes=10) as small:
        with pytest.raises(StoreError, match="more than 10 bytes"):
            small.put("t", KEY, bytes(11))
        assert keys_in(redis) == {}
        large.put("t", KEY, bytes(11))
        assert small.get("t", KEY) is None


def test_keys_of_others_stay_when_a_namespace_is_deleted(redis: RedisServer) -> None:
    """Also chunks without a manifest go, which are no blobs."""
    with valkey_store(redis.url) as store, redis.client() as client:
        client.set("other", "x")
        client.set(f"snapkv:{{t:{KEY}}}:0", "left by a writer that died")
        store.put("t", key_of(1), b"blob")
        assert store.delete_namespace("t") == 1
    assert list(keys_in(redis)) == ["other"]


def test_deletion_looks_at_all_keys(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few a scan shows at once."""
    monkeypatch.setattr(store_module, "_SCAN_COUNT", 3)
    with valkey_store(redis.url) as store:
        for number in range(50):
            store.put("t", key_of(number), b"blob")
        assert store.delete_namespace("t") == 50
    assert keys_in(redis) == {}


def test_database_of_the_url_is_used(redis: RedisServer) -> None:
    """Databases do not see each other."""
    with valkey_store(f"{redis.url}/1") as one, valkey_store(redis.url) as zero:
        one.put("t", KEY, b"blob")
        assert zero.get("t", KEY) is None
    assert len(keys_in(redis, db=1)) == 2


def test_wrong_user_or_password_is_told(redis_program: str, tmp_path: Path) -> None:
    """The reason repeats neither."""
    with redis_server(redis_program, tmp_path / "redis", *USERS) as server:
        for user, password in ((USER, "wrong"), ("nobody", PASSWORD)):
            with (
                valkey_store(user_url(server.port, user, password)) as store,
                pytest.raises(StoreError, match=r"^valkey: the user or the password") as caught,
            ):
                store.get("t", KEY)
            assert password not in str(caught.value)
        with (
            valkey_store(server.url) as store,
            pytest.raises(StoreError, match=r"^valkey: the user or the password"),
        ):
            store.get("t", KEY)


def test_user_without_a_right_is_told(redis_program: str, tmp_path: Path) -> None:
    """Here it may read and not write."""
    user = "user reader on >x ~snapkv:* -@all +get"
    with (
        redis_server(redis_program, tmp_path / "redis", user) as server,
        valkey_store(user_url(server.port, "reader", "x")) as store,
    ):
        assert store.get("t", KEY) is None
        with pytest.raises(StoreError, match=r"^valkey: the user may not run a command"):
            store.put("t", KEY, b"blob")


def test_server_that_became_a_replica_is_left(redis_program: str, tmp_path: Path) -> None:
    """Its name may stand for another one by now, which only a new connection finds."""
    with (
        redis_server(redis_program, tmp_path / "redis") as server,
        server.client() as client,
        valkey_store(server.url) as store,
    ):
        store.put("t", KEY, b"blob")
        before = {found["id"] for found in client.client_list()}
        client.replicaof("127.0.0.1", free_port())
        with pytest.raises(StoreError, match=r"^valkey: it is a replica"):
            store.put("t", KEY, b"other")
        client.replicaof("NO", "ONE")
        assert store.get("t", KEY) == b"blob"
        after = {found["id"] for found in client.client_list()}
        assert len(before) == len(after) == 2
        assert len(before & after) == 1  # the test's own


def test_certificate_of_another_authority_is_refused(tls_url: str, tmp_path: Path) -> None:
    """Before the password is sent; the system's authorities are others, too."""
    other = write_tls_files(tmp_path / "other")
    for ca_file in (other.ca, None):
        with (
            valkey_store(tls_url, ca_file=ca_file) as store,
            pytest.raises(StoreError, match=r"^valkey: its certificate is not one"),
        ):
            store.get("t", KEY)


def test_certificate_of_another_host_is_refused(redis_program: str, tmp_path: Path) -> None:
    """Though the authority is the right one."""
    files = write_tls_files(tmp_path / "tls", host="127.0.0.2")
    with (
        redis_server(
            redis_program, tmp_path / "redis", *tls_lines(files), port_name="tls-port"
        ) as server,
        valkey_store(f"valkeys://127.0.0.1:{server.port}", ca_file=files.ca) as store,
        pytest.raises(StoreError, match=r"^valkey: its certificate is not one"),
    ):
        store.get("t", KEY)


def test_tls_to_a_server_without_it_fails(redis: RedisServer) -> None:
    """And the other way round, within the time limits."""
    with (
        valkey_store(redis.url.replace("redis:", "rediss:")) as store,
        pytest.raises(StoreError, match=r"^valkey: "),
    ):
        store.get("t", KEY)


def test_full_memory_is_an_error_and_leaves_nothing(redis_program: str, tmp_path: Path) -> None:
    """A blob that fits is taken before and after."""
    lines = ["maxmemory 12mb", "maxmemory-policy noeviction"]
    with (
        redis_server(redis_program, tmp_path / "redis", *lines) as server,
        valkey_store(server.url, num_chunks_per_trip=2) as store,
    ):
        store.put("t", key_of(1), b"blob")
        with pytest.raises(StoreError, match=r"^valkey: it is out of memory"):
            store.put("t", KEY, blob_of(32 << 20))
        assert store.get("t", KEY) is None
        assert all(key_of(1) in key for key in keys_in(server))
        store.put("t", KEY, b"blob")
        assert store.get("t", KEY) == b"blob"


def test_evicted_blobs_are_missing_and_others_whole(redis_program: str, tmp_path: Path) -> None:
    """A server that makes room by itself drops keys, not blobs."""
    lines = ["maxmemory 6mb", "maxmemory-policy allkeys-lru"]
    blobs = {key_of(number): blob_of(1 << 20, seed=number) for number in range(12)}
    with (
        redis_server(redis_program, tmp_path / "redis", *lines) as server,
        valkey_store(server.url) as store,
    ):
        kv_store: KVStore = store
        for key, blob in blobs.items():
            kv_store.put("t", key, blob)
        found = {key: kv_store.get("t", key) for key in blobs}
    assert all(found[key] in (None, blob) for key, blob in blobs.items())
    assert None in found.values()
