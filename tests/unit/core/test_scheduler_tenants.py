"""Requests of several tenants take turns, whoever sends more of them."""

import random
from typing import Any

import pytest

from snapkv_core.errors import QueueFullError
from snapkv_core.sequence import FinishReason, Sequence
from tests.unit.core.test_scheduler import Bench


def test_a_single_request_is_not_behind_all_fifty_of_another_tenant() -> None:
    bench = Bench(max_num_seqs=1)
    for _ in range(50):
        bench.add(4, tenant="a")
    bench.run(1)  # the first of them is taken
    bench.add(4, tenant="b")
    bench.run_until_idle()
    assert bench.order() == [1, 2, 51, *range(3, 51)]


def test_tenants_take_turns_and_each_keeps_its_own_order() -> None:
    bench = Bench()
    for tenant in "aaabacbc":
        bench.add(4, tenant=tenant)
    bench.run_until_idle()
    assert bench.order() == [1, 4, 6, 2, 7, 8, 3, 5]


def test_a_tenant_that_comes_back_is_behind_those_that_wait() -> None:
    """Sending one request at a time gives no more turns than waiting with many."""
    bench = Bench(max_num_seqs=1)
    for tenant in "abab":
        bench.add(4, tenant=tenant)
    bench.run(1)
    bench.scheduler.drop(bench.add(4, tenant="c"), FinishReason.ABORT)
    bench.add(4, tenant="c")  # behind b, and behind a, whose turn was before it came
    bench.run_until_idle()
    assert bench.order() == [1, 2, 3, 6, 4]


def test_a_head_without_room_stays_the_head_whoever_comes() -> None:
    bench = Bench(num_pages=20)
    bench.add(4, max_new_tokens=10, tenant="a")
    bench.run(1)
    bench.add(8, max_new_tokens=3, tenant="b")  # 11 pages beside 14
    bench.add(4, tenant="a")
    bench.add(4, tenant="c")
    bench.run(3)
    assert bench.scheduler.num_waiting == 3
    bench.run_until_idle()
    assert bench.order() == [1, 2, 3, 4]


def test_those_that_overtake_take_turns_as_well() -> None:
    """While a long prompt is read, and its reader is owed work, short ones of both tenants come."""
    bench = Bench(overtake_max_tokens=4)
    bench.add(80, tenant="a")
    bench.run(1)
    for tenant in "aaab":
        bench.add(4, tenant=tenant)
    bench.run_until_idle()
    turns = [seq_id for seq_id in bench.order() if seq_id != 1]
    assert turns == [2, 5, 3, 4]
    assert bench.order()[:4] == [1, 2, 1, 5]


def test_nobody_waits_for_more_than_a_round_and_those_that_may_overtake() -> None:
    """A tenant that waits is passed once by each other, and at most eight times by overtakers."""
    longest = 0
    for seed in range(8):
        rng, started = random.Random(seed), ""
        bench = Bench(overtake_max_tokens=4, max_num_seqs=3, max_num_waiting=1_000)
        reserve = bench.ledger.reserve

        def note(group: tuple[Sequence, ...], reserve: Any = reserve) -> None:
            nonlocal started
            started += group[0].tenant
            reserve(group)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bench.ledger, "reserve", note)
            for _ in range(25):
                for tenant in "aaaaabbc":
                    bench.add(rng.choice((2, 4, 30)), tenant=tenant)
                bench.run(2)
            bench.run_until_idle()
        assert len(started) == 25 * 8
        # From one start of the third tenant to the next; nearly always some of it wait.
        gaps = [len(gap) for gap in started.strip("ab").split("c")]
        longest = max(longest, *gaps)
        assert max(gaps) <= 2 + 8
    assert longest > 2  # some were overtaken


@pytest.mark.parametrize("num_waiting", [10, 30])
def test_a_full_room_takes_one_request_of_each_tenant_that_has_none(num_waiting: int) -> None:
    bench = Bench(max_num_seqs=2, max_num_waiting=num_waiting - 2)
    for _ in range(num_waiting):
        bench.add(4, tenant="a")
    for tenant in "bcd":
        bench.add(4, tenant=tenant)
        for refused in ("a", tenant):
            with pytest.raises(QueueFullError):
                bench.add(4, tenant=refused)
    bench.run_until_idle()
    assert len(set(bench.order())) == num_waiting + 3
