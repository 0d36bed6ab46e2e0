"""Who is read when: first come, first served, and when a short prompt overtakes a long one."""

import random

import pytest

from snapkv_core.engine.step_plan import StepFailure, StepResult
from snapkv_core.sequence import FinishReason, Sequence, SequenceStatus
from tests.unit.core.test_scheduler import TOKEN, Bench


def test_the_order_is_that_of_arrival_when_overtaking_is_off() -> None:
    bench = Bench()
    for num_prompt_tokens in (40, 4, 4):
        bench.add(num_prompt_tokens)
    bench.run_until_idle()
    assert bench.order() == [1, 2, 3]


def test_a_head_without_memory_holds_up_those_behind_it() -> None:
    bench = Bench(num_pages=20, overtake_max_tokens=10)
    bench.add(4, max_new_tokens=10)
    bench.run(1)
    bench.add(4, max_new_tokens=3)  # 7 pages beside 14
    bench.add(5, max_new_tokens=1)  # 6 pages
    bench.run(8)
    assert bench.order() == [1]
    assert (bench.scheduler.num_waiting, bench.ledger.num_pages_reserved) == (2, 14)
    bench.run_until_idle()
    assert bench.order() == [1, 2, 3]


def test_a_group_starts_when_each_of_its_choices_has_a_place() -> None:
    bench = Bench(max_num_seqs=4)
    bench.add(4, num_choices=2, max_new_tokens=3)
    bench.add(4, num_choices=3, max_new_tokens=1)
    bench.run(2)
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (2, 1)
    bench.run(1)
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (0, 1)
    assert bench.step().prefill[0].touched_ids == (3, 4, 5)


def test_the_places_count_those_being_read() -> None:
    bench = Bench(max_num_seqs=3, overtake_max_tokens=10)
    bench.add(40, num_choices=2)
    bench.add(4, num_choices=2)
    bench.run(2)
    assert (bench.scheduler.num_prefilling, bench.scheduler.num_running) == (2, 2)
    assert bench.order() == [1]


# ---------------------------------------------------------------------- overtaking


def test_the_next_prompt_overtakes_once_the_last_ones_work_was_given_back() -> None:
    bench = Bench(overtake_max_tokens=8)
    bench.add(40)
    bench.run(1)
    bench.add(8)
    bench.add(4)
    bench.add(4)
    bench.run(9)
    assert [seq_id for seq_id, _ in bench.reads] == [1, 2, 2, 1, 1, 3, 1, 4, 1, 1]


def test_work_done_before_is_no_credit_for_two_overtakers_in_a_row() -> None:
    bench = Bench(overtake_max_tokens=8)
    bench.add(80)
    bench.run(10)
    bench.add(4)
    bench.add(4)
    bench.run(4)
    assert bench.order() == [1, 2, 1, 3, 1]


@pytest.mark.parametrize(("num_prompt_tokens", "order"), [(10, [1, 2, 1]), (11, [1, 2])])
def test_a_prompt_overtakes_up_to_the_limit(num_prompt_tokens: int, order: list[int]) -> None:
    bench = Bench(overtake_max_tokens=10)
    bench.add(40)
    bench.run(1)
    bench.add(num_prompt_tokens)
    bench.run_until_idle()
    assert bench.order() == order


@pytest.mark.parametrize(("num_steps", "order"), [(7, [1, 2, 1]), (8, [1, 2])])
def test_a_prompt_overtakes_only_what_has_more_left(num_steps: int, order: list[int]) -> None:
    bench = Bench(overtake_max_tokens=8)
    bench.add(40)
    bench.run(num_steps)  # 12 or 8 tokens are left
    bench.add(8)
    bench.run_until_idle()
    assert bench.order() == order


def test_nobody_overtakes_an_overtaker() -> None:
    bench = Bench(overtake_max_tokens=20)
    bench.add(80)
    bench.run(1)
    bench.add(20)
    bench.run(1)
    bench.add(1)
    bench.run_until_idle()
    assert bench.order() == [1, 2, 1, 3, 1]


@pytest.mark.parametrize(("num_pages", "workspace_bytes"), [(50, 1_000), (1_000, 48)])
def test_an_overtaker_must_fit_beside_what_it_overtakes(
    num_pages: int, workspace_bytes: int
) -> None:
    bench = Bench(overtake_max_tokens=10, num_pages=num_pages, workspace_bytes=workspace_bytes)
    bench.add(40)
    bench.add(9)  # 41 + 10 pages, 40 + 9 bytes
    bench.add(8)
    bench.run_until_idle()
    assert bench.order() == [3, 1, 2]


def test_nobody_in_the_queue_is_passed_more_than_eight_times() -> None:
    bench = Bench(overtake_max_tokens=4)
    bench.add(400)
    bench.run(1)
    bench.add(40)
    for _ in range(10):
        bench.add(4)
    bench.run(99 + 8)
    passers = [seq_id for seq_id in bench.order() if seq_id != 1]
    assert passers == [3, 4, 5, 6, 7, 8, 9, 10]
    assert bench.reads.count((1, 4)) == 100
    bench.run(3)
    assert bench.order()[-3:] == [11, 2, 12]  # 2 is being read, and overtaken as 1 was


@pytest.mark.parametrize("seed", range(10))
def test_a_long_prompt_under_a_flood_of_short_ones_takes_less_than_twice_as_long(seed: int) -> None:
    rng = random.Random(seed)
    bench = Bench(budget=12.0, num_layers=2, overtake_max_tokens=16, max_num_waiting=10_000)
    (long,) = bench.add(150)
    while long.status is not SequenceStatus.FINISHED:
        bench.add(rng.randint(1, 16))
        bench.step()
    work_of_others = sum(work for seq_id, work in bench.reads if seq_id != long.seq_id)
    assert 150 < work_of_others < 300


def test_short_prompts_behind_long_ones_are_all_read() -> None:
    bench = Bench(overtake_max_tokens=4)
    groups = [bench.add(n) for n in (100, 90, 4, 80, 3, 70, 2)]
    bench.run_until_idle()
    assert all(group[0].finish_reason is FinishReason.LENGTH for group in groups)
    assert bench.order()[:4] == [3, 1, 5, 1]


def test_overtakers_that_fail_at_once_hold_up_nobody_for_free() -> None:
    bench = Bench(overtake_max_tokens=8)
    (long,) = bench.add(80)
    shorts: dict[int, tuple[Sequence, ...]] = {}
    num_steps = 0
    while long.status is not SequenceStatus.FINISHED and num_steps < 100:
        num_steps += 1
        short = bench.add(8)
        shorts[short[0].seq_id] = short
        plan = bench.scheduler.plan()
        reader = plan.prefill[0]
        failures = {} if reader.seq_id == long.seq_id else {reader.seq_id: StepFailure("failed")}
        if failures:
            bench.scheduler.drop(shorts[reader.seq_id], FinishReason.ERROR)
        tokens = {long.seq_id: TOKEN} if reader.is_last and not failures else {}
        bench.scheduler.commit(plan, StepResult(tokens, failures))
    assert num_steps == 20 + 18  # as it has no more left than a short one, none overtakes
