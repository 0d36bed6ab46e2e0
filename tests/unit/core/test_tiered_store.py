"""Several stores as one: which answers, which get copies, and what failures hide."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import pytest

from snapkv_core import InvalidParameterError, KVStore, MemoryStore, StoreError, TieredStore

A, B, C = ("a" * 64, "b" * 64, "c" * 64)


class FarStore:
    """Stands for a store over a network.

    Attributes:
        blobs: What it holds.
        is_down: Whether every call fails.
        on_put: Called as a put begins.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.blobs: dict[tuple[str, str], bytes] = {}
        self.is_down = False
        self.is_closed = False
        self.on_put: Callable[[], object] = lambda: None

    def get(self, namespace: str, key: str) -> bytes | None:
        """Return what it holds."""
        self._fail_if_down()
        return self.blobs.get((namespace, key))

    def put(self, namespace: str, key: str, blob: bytes) -> None:
        """Hold it."""
        self.on_put()
        self._fail_if_down()
        self.blobs[namespace, key] = blob

    def delete_namespace(self, namespace: str) -> int:
        """Let go of it."""
        self._fail_if_down()
        found = [place for place in self.blobs if place[0] == namespace]
        for place in found:
            del self.blobs[place]
        return len(found)

    def close(self) -> None:
        """Note it."""
        self.is_closed = True

    def _fail_if_down(self) -> None:
        if self.is_down:
            raise StoreError(self.name, "it is down")


class Later(Executor):
    """An executor that waits until it is told."""

    def __init__(self) -> None:
        self.tasks: list[Callable[[], object]] = []

    def submit(self, task: Callable[..., Any], /, *_: object, **__: object) -> Future[Any]:
        """Keep a task."""
        self.tasks.append(task)
        return Future()

    def run(self) -> None:
        """Run what waits."""
        tasks, self.tasks = self.tasks, []
        for task in tasks:
            task()


class Tiers:
    """A store of three, and what happens around it."""

    def __init__(self, executor: Executor, **options: int) -> None:
        self.memory = MemoryStore(1_000)
        self.near, self.far = FarStore("near"), FarStore("far")
        self.failures: list[tuple[str, str]] = []
        self.executor = executor
        self.store: KVStore = TieredStore(
            [self.memory, self.near, self.far],
            executor=executor,
            on_error=lambda name, error: self.failures.append((name, error.reason)),
            **options,
        )


@pytest.fixture
def later() -> Later:
    """Return an executor that waits."""
    return Later()


@pytest.fixture
def tiers(later: Later) -> Tiers:
    """Return stores whose copies wait."""
    return Tiers(later)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    """Return an executor with threads, for calls that meet."""
    with ThreadPoolExecutor(4) as executor:
        yield executor


def test_put_reaches_all_stores(tiers: Tiers) -> None:
    """Any of them may be asked by another process."""
    tiers.store.put("t", A, b"blob")
    held = (tiers.memory.get("t", A), tiers.near.get("t", A), tiers.far.get("t", A))
    assert held == (b"blob", b"blob", b"blob")


def test_nearest_store_answers(tiers: Tiers) -> None:
    """Those behind it are not asked, so their failures do not matter."""
    tiers.store.put("t", A, b"blob")
    tiers.near.is_down = tiers.far.is_down = True
    assert tiers.store.get("t", A) == b"blob"
    assert tiers.failures == []


def test_memory_is_filled_at_once_and_others_later(tiers: Tiers, later: Later) -> None:
    """What `get` waits for is a reference to the bytes it returns."""
    tiers.far.put("t", A, b"blob")
    assert tiers.store.get("t", A) == b"blob"
    assert tiers.memory.get("t", A) == b"blob"
    assert tiers.near.blobs == {}
    later.run()
    assert tiers.near.get("t", A) == b"blob"


def test_store_that_answered_gets_no_copy(tiers: Tiers, later: Later) -> None:
    """Nor do stores behind it."""
    tiers.near.put("t", A, b"blob")
    tiers.store.get("t", A)
    assert later.tasks == []
    assert tiers.far.blobs == {}


def test_failing_store_hides_none_behind_it(tiers: Tiers, later: Later) -> None:
    """It is told, and gets no copy that would fail again."""
    tiers.far.put("t", A, b"blob")
    tiers.near.is_down = True
    assert tiers.store.get("t", A) == b"blob"
    assert tiers.failures == [("near", "it is down")]
    assert later.tasks == []


def test_missing_blob_is_missing_though_a_store_failed(tiers: Tiers) -> None:
    """The failure is told beside it."""
    tiers.far.is_down = True
    assert tiers.store.get("t", A) is None
    assert tiers.failures == [("far", "it is down")]


def test_store_fails_when_all_of_its_stores_do() -> None:
    """Then nobody can say."""
    one, two = FarStore("one"), FarStore("two")
    one.is_down = two.is_down = True
    failures: list[str] = []
    store = TieredStore(
        [one, two], executor=Later(), on_error=lambda name, _: failures.append(name)
    )
    with pytest.raises(StoreError, match=r"^tiered: no store answered$"):
        store.get("t", A)
    with pytest.raises(StoreError, match=r"^tiered: no store took the blob$"):
        store.put("t", A, b"blob")
    assert failures == ["one", "two", "one", "two"]


def test_put_into_some_stores_is_enough(tiers: Tiers) -> None:
    """The one that failed is told."""
    tiers.near.is_down = True
    tiers.store.put("t", A, b"blob")
    assert tiers.failures == [("near", "it is down")]
    assert tiers.far.get("t", A) == b"blob"


def test_failing_copy_is_told(tiers: Tiers, later: Later) -> None:
    """It happens when nobody waits for it."""
    tiers.far.put("t", A, b"blob")
    tiers.store.get("t", A)
    tiers.near.is_down = True
    later.run()
    assert tiers.failures == [("near", "it is down")]


def test_waiting_copies_are_limited(later: Later) -> None:
    """Each of them holds a blob; one that is done makes room."""
    tiers = Tiers(later, max_pending_copies=1)
    for key in (A, B, C):
        tiers.far.put("t", key, key.encode())
    tiers.store.get("t", A)
    tiers.store.get("t", B)
    later.run()
    assert set(tiers.near.blobs) == {("t", A)}
    tiers.store.get("t", C)
    later.run()
    assert set(tiers.near.blobs) == {("t", A), ("t", C)}


def test_executor_that_has_ended_takes_no_copy() -> None:
    """The answer is there all the same."""
    executor = ThreadPoolExecutor(1)
    executor.shutdown()
    tiers = Tiers(executor)
    tiers.far.put("t", A, b"blob")
    assert tiers.store.get("t", A) == b"blob"


def test_deletion_counts_what_each_store_held(tiers: Tiers) -> None:
    """Other namespaces stay."""
    tiers.store.put("t", A, b"blob")
    tiers.store.put("other", A, b"blob")
    tiers.far.put("t", B, b"blob")
    assert tiers.store.delete_namespace("t") == 4
    assert tiers.store.get("t", A) is None
    assert tiers.store.get("other", A) == b"blob"


def test_deletion_that_is_not_complete_fails_after_doing_what_it_can(tiers: Tiers) -> None:
    """It names the store where blobs may be left."""
    tiers.store.put("t", A, b"blob")
    tiers.near.is_down = True
    with pytest.raises(StoreError, match=r"^tiered: blobs may be left in near$"):
        tiers.store.delete_namespace("t")
    assert tiers.far.blobs == {}
    assert tiers.failures == [("near", "it is down")]


def test_copy_that_waits_does_not_bring_back_what_was_deleted(tiers: Tiers, later: Later) -> None:
    """But one that is read afterwards is made."""
    tiers.far.put("t", A, b"blob")
    tiers.store.get("t", A)
    tiers.store.delete_namespace("t")
    later.run()
    assert tiers.near.blobs == {}
    tiers.far.put("t", A, b"blob")
    tiers.store.get("t", A)
    later.run()
    assert tiers.near.get("t", A) == b"blob"


def test_deletion_waits_for_a_copy_that_runs(threads: ThreadPoolExecutor) -> None:
    """And removes it with the rest."""
    tiers = Tiers(threads)
    is_copying, may_copy = threading.Event(), threading.Event()

    def wait() -> None:
        is_copying.set()
        may_copy.wait(10)

    tiers.far.put("t", A, b"blob")
    tiers.near.on_put = wait
    tiers.store.get("t", A)
    assert is_copying.wait(10)
    deletion = threads.submit(tiers.store.delete_namespace, "t")
    with pytest.raises(TimeoutError):
        deletion.result(0.1)
    may_copy.set()
    assert deletion.result(10) == 3
    assert tiers.near.blobs == {}


def test_no_store_is_an_error(later: Later) -> None:
    """It names the argument."""
    with pytest.raises(InvalidParameterError, match=r"^stores: "):
        TieredStore([], executor=later, on_error=lambda *_: None)


def test_closing_closes_all(tiers: Tiers) -> None:
    """The executor is the caller's."""
    tiers.store.close()
    assert tiers.near.is_closed
    assert tiers.far.is_closed
