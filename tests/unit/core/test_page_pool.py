"""Pages are handed out once, counted, and come back empty; a broken pool says where."""

from collections.abc import Callable

import pytest
import torch

from snapkv_core import KVCacheError
from snapkv_core.kv_cache.layout import KVLayout
from snapkv_core.kv_cache.page_pool import NULL_PAGE, PagePool
from snapkv_core.kv_cache.page_tables import PageTables

_LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=4, element_bytes=4, page_size=8)


def new_pool(num_pages: int = 6) -> PagePool:
    """Build an empty pool."""
    return PagePool(_LAYOUT, num_pages=num_pages, dtype=torch.float32, device=torch.device("cpu"))


def counts(pool: PagePool, **references: int) -> torch.Tensor:
    """Say how often pages are named, given as `p3=2`; the others are not."""
    expected = torch.zeros(1 + pool.num_pages, dtype=torch.int32)
    for page, count in references.items():
        expected[int(page[1:])] = count
    return expected


def test_a_page_is_handed_out_once_until_it_comes_back() -> None:
    pool = new_pool()
    first, second = pool.take(2), pool.take(4)
    assert sorted([*first.tolist(), *second.tolist()]) == [1, 2, 3, 4, 5, 6]
    assert NULL_PAGE not in first
    assert pool.num_used == 6
    pool.give_back(first)
    assert pool.num_used == 4
    assert sorted(pool.take(2).tolist()) == sorted(first.tolist())


def test_the_ids_that_were_handed_out_stay_as_they_are() -> None:
    pool = new_pool()
    first, second = pool.take(2), pool.take(4)
    before = second.tolist()
    pool.give_back(first)
    assert second.tolist() == before


def test_asking_for_too_many_takes_none() -> None:
    pool = new_pool()
    pool.take(4)
    with pytest.raises(KVCacheError, match="3 pages wanted, 2 are free"):
        pool.take(3)
    assert pool.num_used == 4
    assert len(pool.take(2)) == 2
    assert pool.take(0).tolist() == []


def test_a_shared_page_is_free_when_the_last_of_its_owners_is_gone() -> None:
    pool = new_pool()
    pages = pool.take(2)
    pool.k_pages[pages] = 3.0
    pool.share(pages)
    pool.give_back(pages)
    assert pool.num_used == 2
    assert pool.k_pages[pages].eq(3.0).all()
    pool.give_back(pages)
    assert pool.num_used == 0
    pool.check_integrity(counts(pool))


def test_a_copy_is_equal_and_independent() -> None:
    pool = new_pool()
    pages = pool.take(2)
    pool.k_pages[pages] = torch.randn(2, 8, 4)
    pool.v_pages[pages] = torch.randn(2, 8, 4)
    copies = pool.copy(pages.flip(0))
    assert set(copies.tolist()).isdisjoint(pages.tolist())
    assert torch.equal(pool.k_pages[copies], pool.k_pages[pages.flip(0)])
    assert torch.equal(pool.v_pages[copies], pool.v_pages[pages.flip(0)])
    pool.k_pages[copies] = 0.0
    assert pool.k_pages[pages].any()


@pytest.mark.parametrize("rubbish", [1.0, float("nan"), float("inf")])
def test_every_free_page_holds_zeros(rubbish: float) -> None:
    pool = new_pool()
    pages = pool.take(6)
    pool.k_pages[pages] = rubbish
    pool.v_pages[pages] = rubbish
    pool.give_back(pages[:3])
    pool.give_back(pages[3:])
    assert not pool.k_pages.any()
    assert not pool.v_pages.any()


def _count_wrongly(pool: PagePool) -> None:
    pool._references[3] = 2


def _free_twice(pool: PagePool) -> None:
    pool._free_ids[0] = pool._free_ids[1]


def _forget_a_page(pool: PagePool) -> None:
    pool._num_free -= 1


def _free_a_used_page(pool: PagePool) -> None:
    pool._free_ids[0] = 3


def _write_to_a_free_page(pool: PagePool) -> None:
    pool.v_pages[6, 0, 0] = float("nan")


def _write_to_the_null_page(pool: PagePool) -> None:
    pool.k_pages[NULL_PAGE, 2, 1] = 1.0


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_count_wrongly, "page 3 counts 2 references, 1 page tables name it"),
        (_free_twice, "free twice"),
        (_forget_a_page, "neither free nor referenced"),
        (_free_a_used_page, "neither free nor referenced"),
        (_write_to_a_free_page, "page 6 is free and holds something"),
        (_write_to_the_null_page, "page 0 is free and holds something"),
    ],
)
def test_damage_is_found_and_named(damage: Callable[[PagePool], None], message: str) -> None:
    pool = new_pool()
    assert pool.take(3).tolist() == [3, 2, 1], "low pages first, so the rest stays untouched"
    named = counts(pool, p1=1, p2=1, p3=1)
    pool.check_integrity(named)
    damage(pool)
    with pytest.raises(KVCacheError, match=message):
        pool.check_integrity(named)


def _name_too_many(tables: PageTables) -> None:
    tables.page_tables[0, 1, 0, 2] = 5


def _leave_a_gap(tables: PageTables) -> None:
    tables.page_tables[0, 0, 0] = torch.tensor([71, NULL_PAGE, 72])


def _give_an_unused_slot_a_length(tables: PageTables) -> None:
    tables.page_tables[0, 2, 0, 0] = 5
    tables.kv_lens[0, 2, 0] = 3


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_name_too_many, "as many pages as its length needs"),
        (_leave_a_gap, "gap"),
        (_give_an_unused_slot_a_length, "slot without a sequence"),
    ],
)
def test_damage_to_a_page_table_is_found(
    damage: Callable[[PageTables], None], message: str
) -> None:
    tables = PageTables(_LAYOUT, max_num_seqs=3)
    lens = torch.tensor([9, 17])
    for seq_id in (7, 8):
        page_ids = torch.arange(1, 6, dtype=torch.int32)
        tables.set_prompt(0, tables.add(seq_id), lens, page_ids + 10 * seq_id)
    assert tables.check_integrity().tolist() == [0] * 71 + [1] * 5 + [0] * 5 + [1] * 5
    damage(tables)
    with pytest.raises(KVCacheError, match=message):
        tables.check_integrity()
