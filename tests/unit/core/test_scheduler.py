"""Each rule of the scheduler, with the values that follow from it by hand."""

import math

import pytest

from snapkv_core import CompressionConfig, SamplingParams
from snapkv_core.engine.memory_ledger import MemoryLedger
from snapkv_core.engine.scheduler import Scheduler
from snapkv_core.engine.slice_pacer import SlicePacer
from snapkv_core.engine.step_plan import StepFailure, StepPlan, StepResult
from snapkv_core.errors import KVCacheError, QueueFullError, RequestTooLargeError
from snapkv_core.kv_cache.layout import KVLayout
from snapkv_core.sequence import FinishReason, Sequence, SequenceStatus

_EOS = 0
TOKEN = 5
#: One page table and pages of one token: pages are tokens, so the sums below stay readable.
_LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=2, element_bytes=2, page_size=1)


class FixedPacer(SlicePacer):
    """A step has a fixed budget; by default a token is one FLOP.

    Attributes:
        budget: FLOPs of the next steps.
        asked_with_decode: For each budget, whether it was for a step that decodes as well.
        observed: What the scheduler reported, FLOPs and seconds.
        observed_decode_s: Decode times that it reported.
    """

    def __init__(self, budget: float, *, per_token: float, per_pair: float) -> None:
        super().__init__(
            linear_flops_per_token=per_token,
            attention_flops_per_pair=per_pair,
            target_s=1.0,
            initial_flops_per_s=1.0,
        )
        self.budget = budget
        self.asked_with_decode: list[bool] = []
        self.observed: list[tuple[float, float]] = []
        self.observed_decode_s: list[float] = []

    def budget_flops(self, has_decode: bool) -> float:
        """Return the fixed budget."""
        self.asked_with_decode.append(has_decode)
        return self.budget

    def observe(self, flops: float, seconds: float) -> None:
        """Keep what was reported."""
        self.observed.append((flops, seconds))

    def observe_decode(self, seconds: float) -> None:
        """Keep what was reported."""
        self.observed_decode_s.append(seconds)


class Bench:
    """A scheduler whose steps succeed at once; one token is one FLOP, one page and one byte.

    Attributes:
        reads: Sequence and layer times tokens of every step's slices, in order.
    """

    def __init__(
        self,
        *,
        budget: float = 4.0,
        per_token: float = 1.0,
        per_pair: float = 0.0,
        num_layers: int = 1,
        grid_tokens: int = 4,
        max_slice_tokens: int = 8,
        max_num_seqs: int = 4,
        max_num_waiting: int = 100,
        overtake_max_tokens: int = 0,
        num_pages: int = 10_000,
        workspace_bytes: int = 10_000,
    ) -> None:
        self.pacer = FixedPacer(budget, per_token=per_token, per_pair=per_pair)
        self.ledger = MemoryLedger(
            _LAYOUT,
            num_pages=num_pages,
            workspace_bytes=workspace_bytes,
            workspace_for=lambda num_tokens: num_tokens,
        )
        self.scheduler = Scheduler(
            num_layers=num_layers,
            grid_tokens=grid_tokens,
            max_slice_tokens=max_slice_tokens,
            max_num_seqs=max_num_seqs,
            max_num_waiting=max_num_waiting,
            overtake_max_tokens=overtake_max_tokens,
            eos_token_ids=frozenset({_EOS}),
            ledger=self.ledger,
            pacer=self.pacer,
        )
        self.reads: list[tuple[int, int]] = []
        self._next_id = 1

    def add(
        self,
        num_prompt_tokens: int,
        *,
        num_choices: int = 1,
        max_new_tokens: int = 1,
        deadline_s: float = math.inf,
        ignore_eos: bool = False,
        tenant: str = "",
    ) -> tuple[Sequence, ...]:
        """Queue a request; its sequences get the next ids, from 1."""
        first_id, self._next_id = self._next_id, self._next_id + num_choices
        group = tuple(
            Sequence(
                seq_id=first_id + index,
                request_id=f"request-{first_id}",
                prompt_ids=(7,) * num_prompt_tokens,
                sampling=SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=ignore_eos),
                compression=CompressionConfig(),
                arrival_s=0.0,
                deadline_s=deadline_s,
                choice_index=index,
                tenant=tenant,
            )
            for index in range(num_choices)
        )
        self.scheduler.add(group)
        return group

    def step(self, token_id: int = TOKEN) -> StepPlan:
        """Run a step in which every sequence that is due gets the token."""
        plan = self.scheduler.plan()
        due = list(plan.decode.seq_ids) if plan.decode else []
        if plan.prefill:
            num_read = sum(part.token_end - part.token_start for part in plan.prefill)
            self.reads.append((plan.prefill[0].seq_id, num_read))
        if plan.prefill and plan.prefill[-1].is_last:
            due += plan.prefill[-1].touched_ids
        self.scheduler.commit(plan, StepResult(dict.fromkeys(due, token_id)))
        self.scheduler.check_integrity()
        return plan

    def run(self, num_steps: int) -> None:
        """Run some steps."""
        for _ in range(num_steps):
            self.step()

    def run_until_idle(self) -> None:
        """Run until nothing is left."""
        while self.scheduler.has_work:
            self.step()

    def order(self) -> list[int]:
        """Name the sequences in the order in which their reading took turns."""
        ids = [seq_id for seq_id, _ in self.reads]
        return [each for i, each in enumerate(ids) if i == 0 or ids[i - 1] != each]


def borders(plan: StepPlan) -> list[tuple[int, int, int]]:
    """List layer, first token and token after the last of each slice."""
    return [(part.layer_idx, part.token_start, part.token_end) for part in plan.prefill]


def test_slices_lie_on_the_grid_and_end_with_the_prompt() -> None:
    bench = Bench(budget=1e9, num_layers=2, max_slice_tokens=11)
    bench.add(21)
    layer = [(0, 8), (8, 16), (16, 21)]
    plan = bench.step()
    assert borders(plan) == [(i, start, end) for i in (0, 1) for start, end in layer]
    assert [part.is_first for part in plan.prefill] == [True] + [False] * 5
    assert [part.is_last for part in plan.prefill] == [False] * 5 + [True]


def test_a_step_takes_what_its_budget_allows_and_shortens_the_last_slice() -> None:
    bench = Bench(budget=15.0, num_layers=2)
    bench.add(21)
    steps = [borders(bench.step()) for _ in range(4)]
    assert steps == [
        [(0, 0, 8), (0, 8, 12)],  # 12; another cell of 4 would make 16
        [(0, 12, 20), (0, 20, 21), (1, 0, 4)],  # 13
        [(1, 4, 12), (1, 12, 16)],
        [(1, 16, 21)],
    ]


@pytest.mark.parametrize("budget", [0.0, 3.9, 4.0, 7.9])
def test_a_step_reads_one_cell_however_small_its_budget(budget: float) -> None:
    bench = Bench(budget=budget)
    bench.add(10)
    assert borders(bench.step()) == [(0, 0, 4)]


def test_a_budget_that_fits_exactly_is_used_up() -> None:
    bench = Bench(budget=8.0)
    bench.add(10)
    assert borders(bench.step()) == [(0, 0, 8)]


def test_a_slice_has_a_cell_at_least_however_few_tokens_it_may_have() -> None:
    bench = Bench(budget=9.0, max_slice_tokens=1)
    bench.add(10)
    assert borders(bench.step()) == [(0, 0, 4), (0, 4, 8)]


def test_a_step_reads_one_prompt_only() -> None:
    bench = Bench(budget=1e9, num_layers=2)
    bench.add(4)
    bench.add(4)
    bench.run(2)
    assert bench.reads == [(1, 8), (2, 8)]


def test_late_tokens_of_a_prompt_count_for_more() -> None:
    bench = Bench(budget=36.0, per_token=0.0, per_pair=1.0)
    bench.add(16)
    assert borders(bench.step()) == [(0, 0, 8)]  # 1 + ... + 8 is 36
    assert borders(bench.step()) == [(0, 8, 12)]  # 9 + ... + 12 is 42 already


def test_answers_end_at_their_length_or_at_the_end_of_sequence_token() -> None:
    bench = Bench()
    (stopped,) = bench.add(4, max_new_tokens=3)
    (ignoring,) = bench.add(4, max_new_tokens=3, ignore_eos=True)
    bench.run(2)
    for _ in range(2):
        bench.step(_EOS)
    assert (stopped.finish_reason, stopped.output_ids) == (FinishReason.STOP, [TOKEN, 5, _EOS])
    assert ignoring.finish_reason is FinishReason.LENGTH
    assert ignoring.output_ids == [TOKEN, _EOS, _EOS]
    assert not bench.scheduler.has_work
    assert bench.ledger.num_pages_reserved == 0


def test_a_dropped_choice_frees_its_tail_while_the_others_go_on() -> None:
    bench = Bench()
    first, second = bench.add(4, num_choices=2, max_new_tokens=6)
    bench.run(1)
    assert bench.ledger.num_pages_reserved == 4 + 2 * 6
    assert bench.ledger.workspace_bytes_reserved == 0
    bench.scheduler.drop((first,), FinishReason.STOP)
    assert bench.ledger.num_pages_reserved == 4 + 6
    bench.scheduler.drop((first,), FinishReason.ABORT)
    assert first.finish_reason is FinishReason.STOP
    plan = bench.step()
    assert plan.decode is not None
    assert plan.decode.seq_ids == (second.seq_id,)
    bench.scheduler.drop((second,), FinishReason.ABORT)
    assert bench.ledger.num_pages_reserved == 0
    assert not bench.scheduler.has_work


def test_a_prompt_dropped_while_it_is_read_leaves_nothing() -> None:
    bench = Bench()
    group = bench.add(40, num_choices=2)
    bench.run(1)
    assert bench.ledger.workspace_bytes_reserved == 40
    for sequence in group:  # one by one, as failures are
        bench.scheduler.drop((sequence,), FinishReason.ERROR)
    assert not bench.scheduler.has_work
    assert bench.ledger.num_pages_reserved == bench.ledger.workspace_bytes_reserved == 0
    assert not bench.step().prefill


def test_a_prompt_dropped_during_its_step_does_not_move_another() -> None:
    bench = Bench(overtake_max_tokens=8)
    long, short = bench.add(40), bench.add(8)
    plan = bench.scheduler.plan()
    assert plan.prefill[0].seq_id == short[0].seq_id
    bench.scheduler.drop(short, FinishReason.ABORT)
    bench.scheduler.commit(plan, StepResult())
    assert borders(bench.step()) == [(0, 0, 4)]
    assert bench.reads == [(long[0].seq_id, 4)]


def test_an_overtaker_goes_on_when_the_prompt_it_overtook_is_dropped() -> None:
    bench = Bench(overtake_max_tokens=8)
    long, short = bench.add(40), bench.add(8)
    bench.run(1)
    bench.scheduler.drop(long, FinishReason.ABORT)
    assert borders(bench.step()) == [(0, 4, 8)]
    assert short[0].finish_reason is FinishReason.LENGTH
    assert not bench.scheduler.has_work


def test_a_choice_whose_first_token_fails_takes_no_other_with_it() -> None:
    bench = Bench()
    leader, sibling = bench.add(4, num_choices=2, max_new_tokens=2)
    plan = bench.scheduler.plan()
    assert plan.prefill[0].is_last
    bench.scheduler.drop((leader,), FinishReason.ERROR)
    bench.scheduler.commit(
        plan, StepResult({sibling.seq_id: TOKEN}, {leader.seq_id: StepFailure("failed")})
    )
    assert (sibling.status, sibling.output_ids) == (SequenceStatus.RUNNING, [TOKEN])
    bench.scheduler.check_integrity()
    bench.run_until_idle()
    assert bench.ledger.num_pages_reserved == 0


def test_a_reader_must_not_leave_the_choices_it_reads_for() -> None:
    bench = Bench()
    leader, _ = bench.add(40, num_choices=2)
    bench.run(1)
    bench.scheduler.drop((leader,), FinishReason.ABORT)
    with pytest.raises(AssertionError, match="reads for"):
        bench.scheduler.plan()


def test_a_waiting_request_that_is_dropped_is_never_started() -> None:
    bench = Bench()
    bench.add(40)
    waiting = bench.add(4, num_choices=3)
    bench.run(1)
    reserved = bench.ledger.num_pages_reserved
    bench.scheduler.drop(waiting, FinishReason.ABORT)
    assert (bench.scheduler.num_waiting, bench.ledger.num_pages_reserved) == (0, reserved)
    bench.run_until_idle()
    assert bench.order() == [1]


def test_a_sequence_expires_at_its_deadline_wherever_it_is() -> None:
    bench = Bench()
    running = bench.add(4, max_new_tokens=9, deadline_s=5.0)
    reading = bench.add(40, deadline_s=6.0)
    waiting = bench.add(4, deadline_s=7.0)
    bench.run(2)
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (2, 1)
    assert bench.scheduler.expired(4.999) == ()
    assert bench.scheduler.expired(5.0) == running
    assert bench.scheduler.expired(6.5) == running + reading
    assert bench.scheduler.expired(7.0) == running + reading + waiting
    bench.scheduler.drop(running, FinishReason.DEADLINE)
    assert bench.scheduler.expired(5.0) == ()


def test_a_prompt_being_read_expires_whole_and_running_choices_one_by_one() -> None:
    bench = Bench()
    group = bench.add(8, num_choices=3, max_new_tokens=9)
    group[2].deadline_s = 3.0
    assert bench.scheduler.expired(3.0) == group
    bench.run(1)
    assert bench.scheduler.expired(3.0) == group
    bench.run(1)
    assert bench.scheduler.expired(3.0) == group[2:]


def test_as_many_wait_as_places_and_waiting_places() -> None:
    bench = Bench(max_num_seqs=2, max_num_waiting=3)
    for _ in range(5):
        bench.add(4)
    with pytest.raises(QueueFullError, match="5 requests are waiting"):
        bench.add(4)
    bench.run(1)
    bench.add(4)
    assert bench.scheduler.num_waiting == 5


def test_a_request_that_never_fits_is_refused_before_it_blocks_the_queue() -> None:
    bench = Bench(num_pages=20)
    with pytest.raises(RequestTooLargeError) as caught:
        bench.add(4, num_choices=3, max_new_tokens=6)
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (22 * 8, 20 * 8)
    assert not bench.scheduler.has_work


def test_broken_books_are_found() -> None:
    bench = Bench()
    (running,) = bench.add(4, max_new_tokens=9)
    bench.run(1)
    bench.ledger.release(running)
    with pytest.raises(KVCacheError, match="ledger"):
        bench.scheduler.check_integrity()
    running.status = SequenceStatus.PREFILLING
    with pytest.raises(KVCacheError, match="listed as running"):
        bench.scheduler.check_integrity()
