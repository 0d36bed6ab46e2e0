"""What the pacer learns from a step, and what it does not."""

from snapkv_core.engine.step_plan import StepFailure, StepResult
from snapkv_core.sequence import FinishReason
from tests.unit.core.test_scheduler import Bench


def test_the_pacer_is_told_the_work_and_the_times_of_a_step() -> None:
    bench = Bench(budget=100.0, per_token=3.0, per_pair=1.0, num_layers=2)
    (sequence,) = bench.add(4, max_new_tokens=9)
    bench.scheduler.commit(
        bench.scheduler.plan(), StepResult({sequence.seq_id: 1}, prefill_s=0.5, decode_s=0.0)
    )
    assert bench.pacer.observed == [(2 * (4 * 3 + 1 + 2 + 3 + 4), 0.5)]
    assert bench.pacer.observed_decode_s == []
    bench.scheduler.commit(
        bench.scheduler.plan(), StepResult({sequence.seq_id: 1}, prefill_s=0.0, decode_s=0.25)
    )
    assert len(bench.pacer.observed) == 1
    assert bench.pacer.observed_decode_s == [0.25]
    assert bench.pacer.asked_with_decode == [False, True]


def test_a_step_that_failed_teaches_the_pacer_nothing() -> None:
    bench = Bench()
    group = bench.add(40)
    plan = bench.scheduler.plan()
    bench.scheduler.drop(group, FinishReason.ERROR)
    bench.scheduler.commit(
        plan, StepResult({}, {group[0].seq_id: StepFailure("failed")}, prefill_s=9.0)
    )
    assert bench.pacer.observed == []
