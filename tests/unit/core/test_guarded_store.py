"""A store that fails is left alone for a while, but never where something is to be deleted."""

import pytest

from snapkv_core import GuardedStore, InvalidParameterError, MemoryStore, StoreError
from snapkv_core import StoreHeldBackError as HeldBack
from snapkv_core.kv_cache.circuit_breaker import CircuitBreaker

KEY = "a" * 64


class FlakyStore(MemoryStore):
    """Counts calls, and fails while it is down."""

    is_down = False
    num_calls = 0

    def get(self, namespace: str, key: str) -> bytes | None:
        """Count, and fail or answer."""
        self._count()
        return super().get(namespace, key)

    def put(self, namespace: str, key: str, blob: bytes) -> None:
        """Count, and fail or take it."""
        self._count()
        super().put(namespace, key, blob)

    def delete_namespace(self, namespace: str) -> int:
        """Count, and fail or delete."""
        self._count()
        return super().delete_namespace(namespace)

    def _count(self) -> None:
        self.num_calls += 1
        if self.is_down:
            raise StoreError("flaky", "no connection")


@pytest.fixture
def now_s() -> list[float]:
    return [0.0]


@pytest.fixture
def flaky() -> FlakyStore:
    return FlakyStore(10**6)


@pytest.fixture
def store(flaky: FlakyStore, now_s: list[float]) -> GuardedStore:
    return GuardedStore(flaky, lambda: CircuitBreaker(open_s=30.0, clock=lambda: now_s[0]))


def fail_three_times(store: GuardedStore, flaky: FlakyStore) -> None:
    flaky.is_down = True
    for _ in range(3):
        with pytest.raises(StoreError, match="no connection"):
            store.get("t", KEY)


def test_it_is_the_store_behind_it(store: GuardedStore) -> None:
    store.put("t", KEY, b"blob")
    assert store.get("t", KEY) == b"blob"
    assert store.name == "memory"
    assert store.delete_namespace("t") == 1
    assert store.get("t", KEY) is None


def test_after_three_failures_it_is_not_asked(store: GuardedStore, flaky: FlakyStore) -> None:
    fail_three_times(store, flaky)
    assert flaky.num_calls == 3
    with pytest.raises(HeldBack, match="left alone"):
        store.get("t", KEY)
    assert flaky.num_calls == 3


def test_a_store_that_takes_nothing_is_still_read(store: GuardedStore, flaky: FlakyStore) -> None:
    store.put("t", KEY, b"x")
    flaky.is_down = True
    for _ in range(3):
        with pytest.raises(StoreError, match="no connection"):
            store.put("t", KEY, b"y")
    flaky.is_down = False
    with pytest.raises(HeldBack):
        store.put("t", KEY, b"y")
    assert store.get("t", KEY) == b"x"


def test_one_call_in_a_while_finds_out_that_it_is_back(
    store: GuardedStore, flaky: FlakyStore, now_s: list[float]
) -> None:
    fail_three_times(store, flaky)
    now_s[0] = 31.0
    with pytest.raises(StoreError, match="no connection"):
        store.get("t", KEY)
    with pytest.raises(HeldBack):
        store.get("t", KEY)
    flaky.is_down = False
    now_s[0] = 62.0
    assert store.get("t", KEY) is None
    store.put("t", KEY, b"x")
    assert store.get("t", KEY) == b"x"


def test_deleting_is_always_tried(store: GuardedStore, flaky: FlakyStore) -> None:
    store.put("t", KEY, b"x")
    fail_three_times(store, flaky)
    flaky.is_down = False
    assert store.delete_namespace("t") == 1


def test_wrong_names_are_no_failures_of_the_store(store: GuardedStore) -> None:
    for _ in range(4):
        with pytest.raises(InvalidParameterError, match="namespace"):
            store.get("no such: tenant", KEY)
    assert not store.read_breaker.is_open
