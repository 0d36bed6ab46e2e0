"""The pacer counts work exactly and follows what steps took, without being thrown by one."""

import pytest

from snapkv_core.engine.slice_pacer import SlicePacer


def new_pacer(*, flops_per_s: float = 1_000.0) -> SlicePacer:
    """Build a pacer with a target of 0.1 s."""
    return SlicePacer(
        linear_flops_per_token=10.0,
        attention_flops_per_pair=2.0,
        target_s=0.1,
        initial_flops_per_s=flops_per_s,
    )


@pytest.mark.parametrize("bounds", [(0, 0), (0, 1), (0, 7), (3, 7), (6, 7), (100, 228)])
def test_the_work_of_a_slice_is_summed_over_its_tokens(bounds: tuple[int, int]) -> None:
    expected = sum(10 + 2 * (position + 1) for position in range(*bounds))
    assert new_pacer().slice_flops(*bounds) == expected


def test_before_any_step_the_budget_is_the_guess_times_the_target() -> None:
    assert new_pacer().budget_flops(has_decode=False) == pytest.approx(100.0)
    assert new_pacer().budget_flops(has_decode=True) == pytest.approx(100.0)


def test_decoding_takes_its_time_from_the_budget() -> None:
    pacer = new_pacer()
    pacer.observe_decode(0.04)
    assert pacer.budget_flops(has_decode=True) == pytest.approx(60.0)
    assert pacer.budget_flops(has_decode=False) == pytest.approx(100.0)


@pytest.mark.parametrize(
    ("decode_s", "expected"), [(0.05, 50.0), (0.08, 80.0), (0.1, 100.0), (5.0, 100.0)]
)
def test_prefill_gets_as_long_as_a_slow_decode_step_but_never_more_than_the_target(
    decode_s: float, expected: float
) -> None:
    pacer = new_pacer()
    pacer.observe_decode(decode_s)
    assert pacer.budget_flops(has_decode=True) == pytest.approx(expected)


@pytest.mark.parametrize("true_speed", [10.0, 700.0, 1_000.0, 1e6])
def test_the_estimate_converges_from_either_side(true_speed: float) -> None:
    pacer = new_pacer()
    for _ in range(60):
        flops = pacer.budget_flops(has_decode=False)
        pacer.observe(flops, flops / true_speed)
    assert pacer.budget_flops(has_decode=False) == pytest.approx(true_speed * 0.1, rel=0.01)


def test_one_full_step_moves_the_estimate_a_quarter_of_the_way() -> None:
    pacer = new_pacer()
    pacer.observe(200.0, 0.1)  # twice as fast as guessed
    assert pacer.budget_flops(has_decode=False) == pytest.approx(100.0 * 2**0.25)
    pacer.observe_decode(0.01)
    pacer.observe_decode(0.02)
    expected = 1_000.0 * 2**0.25 * (0.1 - 0.01 * 2**0.25)
    assert pacer.budget_flops(has_decode=True) == pytest.approx(expected)


def test_a_stall_counts_as_four_times_too_slow_at_most() -> None:
    stalled, slow = new_pacer(), new_pacer()
    stalled.observe(100.0, 30.0)
    slow.observe(100.0, 0.4)
    assert stalled.budget_flops(has_decode=False) == slow.budget_flops(has_decode=False)
    assert slow.budget_flops(has_decode=False) == pytest.approx(100.0 * 4**-0.25)


def test_a_nearly_empty_step_says_little() -> None:
    pacer = new_pacer()
    pacer.observe(0.1, 0.001)  # ten times too slow, but only a hundredth of a step
    assert pacer.budget_flops(has_decode=False) == pytest.approx(100.0 * 4 ** (-0.25 * 0.01))


def test_times_and_work_of_nothing_are_ignored() -> None:
    pacer = new_pacer()
    for flops, seconds in ((100.0, 0.0), (100.0, -1.0), (0.0, 1.0), (100.0, float("nan"))):
        pacer.observe(flops, seconds)
    for seconds in (0.0, -1.0, float("nan")):
        pacer.observe_decode(seconds)
    assert pacer.budget_flops(has_decode=True) == pytest.approx(100.0)
