"""What every store does, whatever it keeps blobs in."""

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from snapkv_core import InvalidParameterError, KVStore, MemoryStore, TieredStore
from tests.support.certificates import TlsFiles
from tests.support.redis_server import RedisServer
from tests.support.stores import (
    CHUNK_BYTES,
    KEY,
    PART_BYTES,
    blob_of,
    key_of,
    s3_store,
    valkey_store,
)

STORES = ("memory", "valkey", "valkey_tls", "valkey_cluster", "s3", "tiered")
BAD_PLACES = [
    ("", KEY, "namespace"),
    ("a" * 65, KEY, "namespace"),
    ("a:b", KEY, "namespace"),
    ("a/b", KEY, "namespace"),
    ("a\n", KEY, "namespace"),
    ("*", KEY, "namespace"),
    ("t", "", "key"),
    ("t", KEY.upper(), "key"),
    ("t", KEY[1:], "key"),
    ("t", KEY + "\n", "key"),
]
_numbers = itertools.count()

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def memory() -> KVStore:
    """Return a store in memory."""
    return MemoryStore(64 << 20)


@pytest.fixture(scope="module")
def valkey(redis: RedisServer) -> Iterator[KVStore]:
    """Return a store over a server that anyone may use."""
    with valkey_store(redis.url) as store:
        yield store


@pytest.fixture(scope="module")
def valkey_tls(tls_url: str, tls_files: TlsFiles) -> Iterator[KVStore]:
    """Return a store of a user with the fewest rights, over TLS."""
    with valkey_store(tls_url, ca_file=tls_files.ca) as store:
        yield store


@pytest.fixture(scope="module")
def valkey_cluster(cluster: Sequence[RedisServer]) -> Iterator[KVStore]:
    """Return a store over a cluster."""
    with valkey_store(cluster[1].url, is_cluster=True) as store:
        yield store


@pytest.fixture(scope="module")
def s3(s3_url: str) -> Iterator[KVStore]:
    """Return a store over S3."""
    with pytest.MonkeyPatch.context() as monkeypatch, s3_store(monkeypatch, s3_url) as store:
        yield store


@pytest.fixture(scope="module")
def tiered(memory: KVStore, valkey: KVStore, s3: KVStore) -> Iterator[KVStore]:
    """Return all kinds as one."""

    def fail(name: str, error: Exception) -> None:
        pytest.fail(f"{name}: {error}")

    with ThreadPoolExecutor(2) as executor:
        yield TieredStore([memory, valkey, s3], executor=executor, on_error=fail)


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest) -> KVStore:
    """Return one store after the other."""
    found: KVStore = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def namespace() -> str:
    """Return a namespace that no other test uses."""
    return f"Tenant_{next(_numbers)}-x"


@pytest.mark.parametrize(
    "num_bytes",
    [1, CHUNK_BYTES, CHUNK_BYTES + 1, 9 * CHUNK_BYTES - 1, PART_BYTES, 2 * PART_BYTES + 1],
)
def test_blob_is_returned_as_it_was_put(store: KVStore, namespace: str, num_bytes: int) -> None:
    """Whether or not it fills its last chunk or part."""
    blob = blob_of(num_bytes)
    store.put(namespace, KEY, blob)
    assert store.get(namespace, KEY) == blob


def test_what_was_not_put_is_none(store: KVStore, namespace: str) -> None:
    """Also beside what was."""
    assert store.get(namespace, KEY) is None
    store.put(namespace, KEY, b"blob")
    assert store.get(namespace, key_of(1)) is None


def test_newer_blob_takes_the_place_of_an_older_one(store: KVStore, namespace: str) -> None:
    """Longer or shorter."""
    for num_bytes in (3 * CHUNK_BYTES, 10 * CHUNK_BYTES, 100):
        blob = blob_of(num_bytes, seed=num_bytes)
        store.put(namespace, KEY, blob)
        assert store.get(namespace, KEY) == blob


def test_namespaces_do_not_see_each_other(store: KVStore, namespace: str) -> None:
    """The same key is another blob."""
    store.put(namespace, KEY, b"one")
    assert store.get(f"{namespace}2", KEY) is None
    store.put(f"{namespace}2", KEY, b"two")
    assert (store.get(namespace, KEY), store.get(f"{namespace}2", KEY)) == (b"one", b"two")


def test_deletion_takes_all_of_a_namespace_and_no_more(store: KVStore, namespace: str) -> None:
    """A namespace that begins alike stays."""
    keys = [key_of(number) for number in range(20)]
    for key in keys:
        store.put(namespace, key, blob_of(CHUNK_BYTES + 1))
    store.put(f"{namespace}2", KEY, b"two")
    num_removed = store.delete_namespace(namespace)
    assert num_removed == (60 if store.name == "tiered" else 20)
    assert [store.get(namespace, key) for key in keys] == [None] * 20
    assert store.get(f"{namespace}2", KEY) == b"two"
    assert store.delete_namespace(namespace) == 0


@pytest.mark.parametrize(("namespace", "key", "field"), BAD_PLACES)
def test_other_forms_of_namespace_and_key_are_refused(
    store: KVStore, namespace: str, key: str, field: str
) -> None:
    """The error names which of them."""
    with pytest.raises(InvalidParameterError) as in_get:
        store.get(namespace, key)
    with pytest.raises(InvalidParameterError) as in_put:
        store.put(namespace, key, b"blob")
    assert in_get.value.field == in_put.value.field == field
    if field == "namespace":
        with pytest.raises(InvalidParameterError) as in_delete:
            store.delete_namespace(namespace)
        assert in_delete.value.field == field


def test_empty_blob_is_refused(store: KVStore, namespace: str) -> None:
    """No snapshot is empty."""
    with pytest.raises(InvalidParameterError, match=r"^blob: is empty$"):
        store.put(namespace, KEY, b"")


def test_threads_do_not_disturb_each_other(store: KVStore, namespace: str) -> None:
    """Eight of them write and read keys of their own, and all read one more."""
    blobs = {key_of(seed): blob_of(3 * CHUNK_BYTES + seed, seed) for seed in range(24)}
    store.put(namespace, KEY, b"blob")

    def work(key: str) -> bool:
        store.put(namespace, key, blobs[key])
        return (store.get(namespace, key), store.get(namespace, KEY)) == (blobs[key], b"blob")

    with ThreadPoolExecutor(8) as executor:
        assert all(executor.map(work, blobs))
    assert store.delete_namespace(namespace) == (75 if store.name == "tiered" else 25)


@pytest.mark.parametrize(
    "store",
    [name for name in STORES if name not in ("s3", "tiered")],  # moto fails where S3 does not
    indirect=True,
)
def test_key_that_many_threads_write_is_whole_or_missing(store: KVStore, namespace: str) -> None:
    """Whichever of them was last, and whoever reads in between."""
    blobs = {blob_of(3 * CHUNK_BYTES + seed, seed) for seed in range(48)}

    def work(blob: bytes) -> bytes | None:
        store.put(namespace, KEY, blob)
        return store.get(namespace, KEY)

    with ThreadPoolExecutor(8) as executor:
        found = set(executor.map(work, blobs))
    assert found <= blobs | {None}
    store.put(namespace, KEY, b"blob")
    assert store.get(namespace, KEY) == b"blob"
