"""The Valkey store over a cluster: where blobs lie, and slots and nodes that change."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from valkey.crc import key_slot

from app.integrations.valkey.layout import BlobKeys
from snapkv_core import StoreError
from tests.support.redis_server import RedisServer, keys_in, redis_cluster
from tests.support.stores import CHUNK_BYTES, KEY, blob_of, key_of, valkey_store
from tests.support.tools import require_tool

BLOB = blob_of(4 * CHUNK_BYTES)
NUM_BLOBS = 30

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def nothing_there(cluster: Sequence[RedisServer]) -> None:
    """Begin without keys."""
    for node in cluster:
        with node.client() as client:
            client.flushall()


def slots_of(node: RedisServer) -> set[int]:
    """Return the slots that a node says it holds."""
    with node.client() as client:
        return {
            slot
            for first, last, primary, *_ in client.execute_command("CLUSTER SLOTS")
            if primary[1] == node.port
            for slot in range(first, last + 1)
        }


def holder_of(nodes: Sequence[RedisServer], key: str) -> RedisServer:
    """Return the node that holds a blob, by what the nodes say themselves."""
    slot = key_slot(BlobKeys("t", key).manifest.encode())
    (holder,) = [node for node in nodes if slot in slots_of(node)]
    return holder


def test_blob_lies_on_one_node_and_blobs_on_all(cluster: Sequence[RedisServer]) -> None:
    """So balance is by blobs: a large one is not spread."""
    with valkey_store(cluster[0].url, is_cluster=True) as store:
        for number in range(NUM_BLOBS):
            store.put("t", key_of(number), BLOB)
    names = [{key.rpartition(":")[0] for key in keys_in(node)} for node in cluster]
    assert sum(len(found) for found in names) == NUM_BLOBS == len(set.union(*names))
    assert all(len(found) > NUM_BLOBS / 10 for found in names)
    assert sum(len(keys_in(node)) for node in cluster) == NUM_BLOBS * 5


def test_any_node_leads_to_all(cluster: Sequence[RedisServer]) -> None:
    """What was put through one address is got through another."""
    with valkey_store(cluster[0].url, is_cluster=True) as one:
        for number in range(NUM_BLOBS):
            one.put("t", key_of(number), BLOB)
    with valkey_store(cluster[2].url, is_cluster=True) as two:
        assert all(two.get("t", key_of(number)) == BLOB for number in range(NUM_BLOBS))
        assert two.delete_namespace("t") == NUM_BLOBS
    assert [keys_in(node) for node in cluster] == [{}, {}, {}]


def move_slot(nodes: Sequence[RedisServer], slot: int, source: RedisServer) -> RedisServer:
    """Give a slot and its keys to another node; return that one."""
    target = next(node for node in nodes if node is not source)
    with source.client() as giving, target.client() as taking:
        names = {client: client.execute_command("CLUSTER MYID") for client in (giving, taking)}
        taking.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", names[giving])
        giving.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", names[taking])
        keys = giving.execute_command("CLUSTER GETKEYSINSLOT", slot, 1_000)
        move = ("MIGRATE", "127.0.0.1", target.port, "", 0, 5_000, "KEYS", *keys)
        giving.execute_command(*move)
        for client in (taking, giving):
            client.execute_command("CLUSTER SETSLOT", slot, "NODE", names[taking])
    return target


def test_slot_that_moved_is_found_in_the_same_call(cluster: Sequence[RedisServer]) -> None:
    """Reading and writing; the store's map of the cluster is from before."""
    with valkey_store(cluster[0].url, is_cluster=True) as store:
        store.put("t", KEY, BLOB)
        slot = key_slot(BlobKeys("t", KEY).manifest.encode())
        target = move_slot(cluster, slot, holder_of(cluster, KEY))
        assert store.get("t", KEY) == BLOB
        assert len(keys_in(target)) == 5
        move_slot(cluster, slot, target)
        store.put("t", KEY, BLOB[::-1])
        assert store.get("t", KEY) == BLOB[::-1]


def test_dead_node_fails_its_own_keys_only(redis_program: str, tmp_path: Path) -> None:
    """Even when it is the one that the store was told of."""
    cli = require_tool("redis-cli", "SNAPKV_TEST_REDIS_CLI")
    with (
        redis_cluster(redis_program, cli, tmp_path) as nodes,
        valkey_store(nodes[0].url, is_cluster=True) as store,
    ):
        keys = [key_of(number) for number in range(NUM_BLOBS)]
        for key in keys:
            store.put("t", key, BLOB)
        holders = {key: holder_of(nodes, key) for key in keys}
        nodes[0].process.kill()
        nodes[0].process.wait()
        found: dict[str, Any] = {}
        for key in keys:
            try:
                found[key] = store.get("t", key)
            except StoreError as error:
                found[key] = error.reason
        expected = {
            key: "it cannot be reached, or broke the connection off (ConnectionError)"
            if holder is nodes[0]
            else BLOB
            for key, holder in holders.items()
        }
        assert found == expected


def test_single_server_is_no_cluster(redis: RedisServer) -> None:
    """Calls fail and say so; nothing waits."""
    with (
        valkey_store(redis.url, is_cluster=True) as store,
        pytest.raises(StoreError, match=r"^valkey: it refused a command"),
    ):
        store.get("t", KEY)
