"""The store in memory: what it keeps, for how long, and what it refuses."""

from typing import Any

import pytest

from snapkv_core import InvalidParameterError, KVStore, MemoryStore, NullStore

A, B, C = ("a" * 64, "b" * 64, "c" * 64)


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now_s


def test_least_recently_used_goes_first() -> None:
    """Reading counts as use, and no more goes than room is needed."""
    store = MemoryStore(10)
    store.put("t", A, b"1234")
    store.put("t", B, b"1234")
    assert store.get("t", A) == b"1234"
    store.put("t", C, b"123")
    assert (store.get("t", A), store.get("t", B), store.get("t", C)) == (b"1234", None, b"123")
    assert store.num_bytes == 7


def test_namespaces_share_the_room() -> None:
    """One tenant's blobs make room for another's."""
    store = MemoryStore(4)
    store.put("one", A, b"1234")
    store.put("two", A, b"4321")
    assert (store.get("one", A), store.get("two", A)) == (None, b"4321")


def test_blob_that_fills_the_store_is_kept_and_a_larger_one_is_not() -> None:
    """A blob that is not taken leaves the others, but not an older one of its own key."""
    store = MemoryStore(4)
    store.put("t", A, b"1234")
    store.put("t", B, b"12345")
    assert (store.get("t", A), store.get("t", B)) == (b"1234", None)
    store.put("t", A, b"12345")
    assert store.get("t", A) is None
    assert store.num_bytes == 0


def test_replaced_blob_counts_once() -> None:
    """By its new size."""
    store = MemoryStore(4)
    for blob in (b"1234", b"12", b"123"):
        store.put("t", A, blob)
    assert store.num_bytes == 3
    assert store.get("t", A) == b"123"


def test_blob_is_not_copied() -> None:
    """A blob may be half a gigabyte."""
    store, blob = MemoryStore(10_000), b"x" * 1_000
    store.put("t", A, blob)
    assert store.get("t", A) is blob


def test_old_blobs_are_dropped_however_often_they_are_read() -> None:
    """Their bytes are free as soon as anything is read or written."""
    clock = Clock()
    store = MemoryStore(100, max_age_s=10, clock=clock)
    store.put("t", A, b"1234")
    clock.now_s = 6.0
    store.put("t", B, b"12")
    assert store.get("t", A) == b"1234"
    clock.now_s = 10.0
    assert store.get("t", C) is None
    assert store.num_bytes == 2
    assert (store.get("t", A), store.get("t", B)) == (None, b"12")


def test_without_an_age_blobs_stay() -> None:
    """Until others need their room."""
    clock = Clock()
    store = MemoryStore(100, clock=clock)
    store.put("t", A, b"1234")
    clock.now_s = 1e12
    assert store.get("t", A) == b"1234"


def test_closed_store_holds_nothing() -> None:
    """Its memory is given back."""
    store = MemoryStore(100)
    store.put("t", A, b"1234")
    store.close()
    assert store.num_bytes == 0


@pytest.mark.parametrize(
    ("arguments", "field"),
    [({"max_bytes": -1}, "max_bytes"), ({"max_bytes": 1, "max_age_s": 0}, "max_age_s")],
)
def test_limits_are_checked(arguments: dict[str, Any], field: str) -> None:
    """The error names the limit."""
    with pytest.raises(InvalidParameterError) as caught:
        MemoryStore(**arguments)
    assert caught.value.field == field


def test_null_store_keeps_nothing() -> None:
    """But refuses what any store refuses."""
    store: KVStore = NullStore()
    store.put("t", A, b"1234")
    assert store.get("t", A) is None
    assert store.delete_namespace("t") == 0
    store.close()
    with pytest.raises(InvalidParameterError, match=r"^blob: is empty$"):
        store.put("t", A, b"")
