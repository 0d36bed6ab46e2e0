"""The Valkey store when something breaks: a miss or an error in time, never another blob."""

import json
import multiprocessing
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from snapkv_core import StoreError
from tests.support.redis_server import RedisServer, keys_in, redis_server
from tests.support.served import free_port
from tests.support.stores import CHUNK_BYTES, KEY, blob_of, valkey_store
from tests.support.tcp_proxy import TcpProxy

BLOB = blob_of(4 * CHUNK_BYTES)
PREFIX = f"snapkv:{{t:{KEY}}}"

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def nothing_there(redis: RedisServer) -> None:
    """Begin with a server without keys."""
    with redis.client() as client:
        client.flushall()


@pytest.fixture
def client(redis: RedisServer) -> Iterator[Any]:
    """Return a client to break blobs with."""
    with redis.client() as client:
        yield client


@contextmanager
def failing_within(seconds: float, reason: str) -> Iterator[None]:
    """Expect a failure for a reason, before so many seconds are over."""
    begun_s = time.monotonic()
    with pytest.raises(StoreError, match=f"^valkey: {reason}"):
        yield
    assert time.monotonic() - begun_s < seconds


@pytest.mark.parametrize("is_cluster", [False, True])
def test_refused_connection_is_an_error_at_once(is_cluster: bool) -> None:
    """Making a store connects to nothing, so it does not fail either."""
    url = f"valkey://127.0.0.1:{free_port()}"
    with valkey_store(url, is_cluster=is_cluster) as store:
        for call in (
            lambda: store.get("t", KEY),
            lambda: store.put("t", KEY, BLOB),
            lambda: store.delete_namespace("t"),
        ):
            with failing_within(5.0, "it cannot be reached"):
                call()


@pytest.mark.parametrize("scheme", ["valkey", "valkeys"])
def test_server_that_never_answers_is_given_up(scheme: str) -> None:
    """It takes connections: the kernel does that for it."""
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        valkey_store(
            f"{scheme}://127.0.0.1:{silent.getsockname()[1]}", idle_timeout_s=0.3
        ) as store,
    ):
        with failing_within(5.0, "it did not answer in time"):
            store.get("t", KEY)
        with failing_within(5.0, "it did not answer in time"):
            store.put("t", KEY, blob_of(32 << 20))


def test_server_that_answers_a_byte_at_a_time_is_given_up(redis: RedisServer) -> None:
    """It is never silent for long."""
    with valkey_store(redis.url) as store:
        store.put("t", KEY, BLOB)
    with (
        TcpProxy(redis.port, trickle_s=0.01) as proxy,
        valkey_store(f"valkey://127.0.0.1:{proxy.port}", get_timeout_s=0.5) as store,
        failing_within(5.0, "it did not answer in time"),
    ):
        store.get("t", KEY)


def test_server_that_stops_taking_bytes_is_given_up(redis: RedisServer) -> None:
    """In the middle of a chunk that no buffer holds; the next reader finds nothing."""
    with (
        TcpProxy(redis.port, hold_after_bytes=100_000) as proxy,
        valkey_store(
            f"valkey://127.0.0.1:{proxy.port}", chunk_bytes=32 << 20, idle_timeout_s=0.3
        ) as store,
        failing_within(5.0, "it did not answer in time"),
    ):
        store.put("t", KEY, blob_of(32 << 20))
    with valkey_store(redis.url) as store:
        assert store.get("t", KEY) is None


def test_writer_that_is_killed_ends_the_blob_that_was_there(redis: RedisServer) -> None:
    """Its first chunks are not read together with the last ones of before."""
    with valkey_store(redis.url) as store:
        store.put("t", KEY, BLOB)
    with (
        TcpProxy(redis.port, hold_after_bytes=int(2.5 * CHUNK_BYTES)) as proxy,
        valkey_store(
            f"valkey://127.0.0.1:{proxy.port}", num_chunks_per_trip=1, idle_timeout_s=0.3
        ) as store,
        failing_within(5.0, "it did not answer in time"),
    ):
        store.put("t", KEY, BLOB[::-1])
    # Else a reader would take the new chunks for broken ones and remove them.
    assert f"{PREFIX}:m" not in keys_in(redis)
    with valkey_store(redis.url) as store:
        assert store.get("t", KEY) is None


def test_server_that_is_killed_fails_calls_until_it_is_back(
    redis_program: str, tmp_path: Path
) -> None:
    """The store connects again by itself."""
    with (
        redis_server(redis_program, tmp_path / "one") as server,
        valkey_store(server.url) as store,
    ):
        store.put("t", KEY, BLOB)
        server.process.kill()
        server.process.wait()
        with failing_within(5.0, "it cannot be reached"):
            store.get("t", KEY)
        with redis_server(redis_program, tmp_path / "two", port=server.port):
            assert store.get("t", KEY) is None
            store.put("t", KEY, BLOB)
            assert store.get("t", KEY) == BLOB


def test_evicted_chunk_is_a_miss_and_the_rest_is_removed(redis: RedisServer, client: Any) -> None:
    """It would take room that nobody can use."""
    with valkey_store(redis.url) as store:
        store.put("t", KEY, BLOB)
        client.delete(f"{PREFIX}:2")
        assert store.get("t", KEY) is None
    assert keys_in(redis) == {}


def flipped(chunk: bytes) -> bytes:
    """Change one bit."""
    return chunk[:100] + bytes([chunk[100] ^ 4]) + chunk[101:]


@pytest.mark.parametrize("index", [0, 3])
@pytest.mark.parametrize(
    "broken", [flipped, lambda chunk: chunk[:-1], lambda chunk: chunk + b"x", lambda _: b""]
)
def test_broken_chunk_is_a_miss_and_the_rest_is_removed(
    redis: RedisServer, client: Any, index: int, broken: Any
) -> None:
    """A bit flipped, bytes cut off or added."""
    with valkey_store(redis.url) as store:
        store.put("t", KEY, BLOB)
        name = f"{PREFIX}:{index}"
        client.set(name, broken(client.get(name)))
        assert store.get("t", KEY) is None
    assert keys_in(redis) == {}


def test_chunks_that_changed_places_are_a_miss(redis: RedisServer, client: Any) -> None:
    """Each is whole and of the right length."""
    with valkey_store(redis.url) as store:
        store.put("t", KEY, BLOB)
        client.rename(f"{PREFIX}:1", f"{PREFIX}:other")
        client.rename(f"{PREFIX}:2", f"{PREFIX}:1")
        client.rename(f"{PREFIX}:other", f"{PREFIX}:2")
        assert store.get("t", KEY) is None


def test_manifest_of_another_version_is_a_miss_and_stays(redis: RedisServer, client: Any) -> None:
    """Replicas of two versions may share a server while one replaces the other."""
    with valkey_store(redis.url) as store:
        store.put("t", KEY, BLOB)
        fields = json.loads(client.get(f"{PREFIX}:m"))
        newer = json.dumps(fields | {"version": 2}).encode()
        client.set(f"{PREFIX}:m", newer)
        assert store.get("t", KEY) is None
        assert client.get(f"{PREFIX}:m") == newer
        assert len(keys_in(redis)) == 5


def test_key_of_another_kind_is_an_error(redis: RedisServer, client: Any) -> None:
    """The server refuses to read a list as text."""
    client.rpush(f"{PREFIX}:m", "x")
    with valkey_store(redis.url) as store, failing_within(5.0, "it refused a command"):
        store.get("t", KEY)


def test_what_is_no_valkey_is_an_error() -> None:
    """An HTTP server, for one."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as executor:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        executor.submit(answer)
        url = f"valkey://127.0.0.1:{listener.getsockname()[1]}"
        with valkey_store(url) as store, failing_within(5.0, "the answer is not one of Valkey"):
            store.get("t", KEY)


def test_connection_that_the_server_ended_is_replaced(redis: RedisServer, client: Any) -> None:
    """As servers and balancers do with idle ones."""
    with valkey_store(redis.url) as store:
        store.put("t", KEY, BLOB)
        client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        assert store.get("t", KEY) == BLOB


def write_slowly(port: int) -> None:
    """Write a blob, one chunk at a time."""
    with valkey_store(f"valkey://127.0.0.1:{port}", num_chunks_per_trip=1) as store:
        store.put("t", KEY, BLOB)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_writer_that_is_killed_leaves_a_miss(redis: RedisServer) -> None:
    """Two of its chunks are there and no manifest."""
    with TcpProxy(redis.port, hold_after_bytes=int(2.5 * CHUNK_BYTES)) as proxy:
        # A process that begins anew would first import PyTorch for many seconds.
        fork = multiprocessing.get_context("fork")
        writer = fork.Process(target=write_slowly, args=(proxy.port,))
        writer.start()
        assert proxy.is_holding.wait(20)
        writer.kill()
        writer.join()
        writer.close()
    assert list(keys_in(redis)) == [f"{PREFIX}:0", f"{PREFIX}:1"]
    with valkey_store(redis.url) as store:
        assert store.get("t", KEY) is None
        store.put("t", KEY, BLOB)
        assert store.get("t", KEY) == BLOB
