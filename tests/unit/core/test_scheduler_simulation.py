"""The scheduler does, step for step, what a slow restatement of its rules does."""

import random
from collections import Counter

import pytest

from snapkv_core import CompressionConfig, SamplingParams
from snapkv_core.engine.memory_ledger import MemoryLedger
from snapkv_core.engine.scheduler import Scheduler
from snapkv_core.engine.slice_pacer import SlicePacer
from snapkv_core.engine.step_plan import StepFailure, StepPlan, StepResult
from snapkv_core.errors import InvalidParameterError, QueueFullError
from snapkv_core.kv_cache.layout import KVLayout
from snapkv_core.sequence import FinishReason, Sequence, SequenceStatus
from tests.oracles.scheduler_simulation import Request, Rules, SchedulerSimulation, Slice

_EOS = 0
_NUM_SEEDS = 200
_NUM_BUSY_STEPS = 25


class ScriptedPacer(SlicePacer):
    """A pacer whose budget the test sets."""

    budget = 0.0
    was_told_of_decode = False

    def budget_flops(self, has_decode: bool) -> float:
        """Return what the test set."""
        self.was_told_of_decode = has_decode
        return self.budget


def draw_rules(rng: random.Random, *, is_flood: bool) -> Rules:
    """Draw a small engine; often so small that requests wait for pages or for workspace.

    Args:
        rng: Where to draw from.
        is_flood: Whether it has room for a flood of short prompts before long ones.
    """
    num_layers, num_kv_heads = rng.randint(1, 3), rng.randint(1, 2)
    return Rules(
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        page_size=rng.choice((1, 2, 4)),
        grid_tokens=rng.randint(1, 5),
        max_slice_tokens=rng.randint(1, 14),
        max_num_seqs=rng.randint(3 if is_flood else 1, 6),
        max_num_waiting=30 if is_flood else rng.randint(1, 12),
        overtake_max_tokens=4 if is_flood else rng.choice((0, 4, 10, 30)),
        num_pages=num_layers * num_kv_heads * (200 if is_flood else rng.randint(4, 40)),
        workspace_bytes=170 if is_flood else rng.randint(60, 160),
        workspace_bytes_per_token=3,
        work_per_token=rng.randint(1, 9),
        work_per_pair=rng.randint(0, 2),
        eos_token_ids=frozenset({_EOS}),
    )


class Pair:
    """The scheduler and the simulation, fed the same events and compared after each.

    Attributes:
        sequences: Every sequence that was accepted, by id.
        num_steps: Steps run.
        is_flood: Whether nearly all prompts are tiny, and the others long.
        tenants: Whose requests come, some of them more often.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.is_flood = seed % 5 == 0
        self.tenants = ("",) if seed % 2 == 0 else ("a", "a", "a", "b", "b", "c")
        self.rules = rules = draw_rules(self.rng, is_flood=self.is_flood)
        self.simulation = SchedulerSimulation(rules)
        self.pacer = ScriptedPacer(
            linear_flops_per_token=rules.work_per_token,
            attention_flops_per_pair=rules.work_per_pair,
            target_s=1.0,
            initial_flops_per_s=1.0,
        )
        layout = KVLayout(rules.num_layers, rules.num_kv_heads, 4, 2, rules.page_size)
        self.ledger = MemoryLedger(
            layout,
            num_pages=rules.num_pages,
            workspace_bytes=rules.workspace_bytes,
            workspace_for=lambda num_tokens: rules.workspace_bytes_per_token * num_tokens,
        )
        self.scheduler = Scheduler(
            num_layers=rules.num_layers,
            grid_tokens=rules.grid_tokens,
            max_slice_tokens=rules.max_slice_tokens,
            max_num_seqs=rules.max_num_seqs,
            max_num_waiting=rules.max_num_waiting,
            overtake_max_tokens=rules.overtake_max_tokens,
            eos_token_ids=rules.eos_token_ids,
            ledger=self.ledger,
            pacer=self.pacer,
        )
        self.sequences: dict[int, Sequence] = {}
        self.num_steps = 0
        self._next_id = 1

    def arrive(self) -> None:
        """Submit a random request to both; they accept or refuse alike."""
        group = self._draw_group()
        request = Request(
            ids=[sequence.seq_id for sequence in group],
            num_prompt_tokens=group[0].num_prompt_tokens,
            capacity=None
            if group[0].compression.method == "full"
            else group[0].compression.max_capacity_prompt,
            max_new_tokens=group[0].max_new_tokens,
            deadline=group[0].deadline_s,
            ignore_eos=group[0].sampling.ignore_eos,
            tenant=group[0].tenant,
        )
        if not self.simulation.is_possible(request):
            with pytest.raises(InvalidParameterError):
                self.scheduler.add(group)
        elif self.simulation.add(request):
            self.scheduler.add(group)
            self.sequences.update({sequence.seq_id: sequence for sequence in group})
        else:
            with pytest.raises(QueueFullError):
                self.scheduler.add(group)

    def drop(self, seq_ids: list[int], reason: FinishReason) -> None:
        """Drop sequences from both."""
        self.scheduler.drop(tuple(self.sequences[seq_id] for seq_id in seq_ids), reason)
        for seq_id in seq_ids:
            self.simulation.drop(seq_id)
            assert self.sequences[seq_id].status is SequenceStatus.FINISHED
        self.compare()

    def step(self, failure_rate: float) -> None:
        """Plan, run and commit a step; parts of it may fail."""
        now = float(self.num_steps)
        late = self.scheduler.expired(now)
        assert {sequence.seq_id for sequence in late} == self.simulation.expired(now)
        if late:
            self.drop([sequence.seq_id for sequence in late], FinishReason.DEADLINE)

        budgets = (5, 20, 30) if self.is_flood else (0, 5, 20, 60, 200)
        self.pacer.budget = float(self.rng.choice(budgets))
        plan = self.scheduler.plan()
        slices, decode = self.simulation.plan(self.pacer.budget)
        assert [_as_tuple(plan, i) for i in range(len(plan.prefill))] == slices
        assert list(plan.decode.seq_ids if plan.decode else ()) == decode
        assert self.pacer.was_told_of_decode == bool(decode)
        assert slices or decode or not self.scheduler.has_work
        self.compare()

        tokens, failures = self._run(slices, decode, failure_rate)
        for seq_id in failures:
            self.drop([seq_id], FinishReason.ERROR)
        self.scheduler.commit(plan, StepResult(tokens, failures, 1.0, 1.0))
        self.simulation.end_step(slices, tokens)
        self.compare()
        self.num_steps += 1

    def compare(self) -> None:
        """Check that both are in the same state, and that it is a sound one."""
        scheduler, simulation = self.scheduler, self.simulation
        scheduler.check_integrity()
        num_reading = sum(len(request.ids) for request in simulation.reading)
        assert scheduler.num_waiting == len(simulation.queue)
        assert scheduler.num_prefilling == num_reading
        assert scheduler.num_running == num_reading + len(simulation.running)
        assert self.ledger.num_pages_reserved == simulation.pages_reserved() <= self.rules.num_pages
        assert self.ledger.workspace_bytes_reserved == simulation.workspace_reserved()
        assert self.ledger.workspace_bytes_reserved <= self.rules.workspace_bytes
        running = {seq_id for seq_id, _ in simulation.running}
        statuses = {seq_id for seq_id, each in self.sequences.items() if each.status == "running"}
        assert statuses == running

    def _draw_group(self) -> tuple[Sequence, ...]:
        rng = self.rng
        if self.is_flood:
            lengths = rng.choice((range(1, 3),) * 9 + (range(40, 54),))
        else:
            lengths = rng.choice((range(1, 9), range(1, 9), range(9, 50)))
        num_prompt_tokens = rng.choice(lengths)
        sampling = SamplingParams(
            max_new_tokens=rng.randint(1, 3 if self.is_flood else 12),
            ignore_eos=rng.random() < 0.5,
            seed=1,
        )
        compression = CompressionConfig(
            method=rng.choice(("full", "snapkv", "snapkv")),
            max_capacity_prompt=rng.randint(2, 24),
            window_size=1,
        )
        deadline = float(self.num_steps + rng.randint(1, 60)) if rng.random() < 0.2 else 1e9
        num_choices = min(rng.choice((1, 1, 1, 2, 3)), self.rules.max_num_seqs)
        tenant = rng.choice(self.tenants)
        first_id, self._next_id = self._next_id, self._next_id + num_choices
        return tuple(
            Sequence(
                seq_id=first_id + index,
                request_id=str(first_id),
                prompt_ids=(7,) * num_prompt_tokens,
                sampling=sampling,
                compression=compression,
                arrival_s=float(self.num_steps),
                deadline_s=deadline,
                choice_index=index,
                tenant=tenant,
            )
            for index in range(num_choices)
        )

    def _run(
        self, slices: list[Slice], decode: list[int], failure_rate: float
    ) -> tuple[dict[int, int], dict[int, StepFailure]]:
        """Make up the tokens and the failures of a step."""
        rng = self.rng
        readers = [slices[0][0], *slices[0][4]] if slices else []
        sampled = [*decode, *(readers if slices and slices[-1][-1] else [])]
        failures: dict[int, StepFailure] = {}
        if rng.random() < failure_rate:
            touched = rng.choice((readers, decode, sampled[-1:], sampled[:1]))
            failures = dict.fromkeys(touched, StepFailure("failed"))
        tokens = {seq_id: rng.randint(0, 9) for seq_id in sampled if seq_id not in failures}
        return tokens, failures


def _as_tuple(plan: StepPlan, index: int) -> Slice:
    part = plan.prefill[index]
    return (
        part.seq_id,
        part.layer_idx,
        part.token_start,
        part.token_end,
        part.sibling_ids,
        part.is_first,
        part.is_last,
    )


def disturb(pair: Pair) -> None:
    """End something from outside: a request, one choice of one, or what has ended already."""
    rng, simulation = pair.rng, pair.simulation
    groups = [request.ids for request in simulation.queue + simulation.reading]
    choices = [[seq_id] for seq_id, _ in simulation.running]
    choices += [[request.ids[-1]] for request in simulation.reading if len(request.ids) > 1]
    choices += [[rng.choice(request.ids)] for request in simulation.queue]
    ended = [[seq_id] for seq_id, each in pair.sequences.items() if each.status == "finished"]
    kinds: list[list[list[int]]] = [kind for kind in (groups, choices, ended) if kind]
    if kinds:
        pair.drop(list(rng.choice(rng.choice(kinds))), FinishReason.ABORT)


def run_until_idle(pair: Pair) -> None:
    """Run to the end; every step must read a cell or decode a token."""
    simulation = pair.simulation
    requests = [*simulation.queue, *simulation.reading]
    bound = sum(len(simulation.cells(request)) for request in requests)
    bound += sum(len(request.ids) * request.max_new_tokens for request in simulation.arrived)
    last_step = pair.num_steps + bound
    while pair.scheduler.has_work:
        pair.step(failure_rate=0.0)
        assert pair.num_steps <= last_step
    assert all(each.status is SequenceStatus.FINISHED for each in pair.sequences.values())
    assert pair.ledger.num_pages_reserved == pair.ledger.workspace_bytes_reserved == 0
    assert pair.scheduler.num_running == pair.scheduler.num_waiting == 0


def count_situations(pair: Pair) -> Counter[str]:
    """Name the rules that are at work right now."""
    simulation = pair.simulation
    reading, queue = simulation.reading, simulation.queue
    return Counter(
        overtaking=len(reading) == 2,
        owing=bool(reading) and simulation.owed(reading[0]) > 0,
        blocked_head=bool(queue) and not reading,
        patience_at_its_end=any(simulation.times_passed(request) == 8 for request in queue),
        out_of_arrival_order=simulation.in_order() != queue,
        beyond_a_full_room=len(queue) > pair.rules.max_num_seqs + pair.rules.max_num_waiting,
        reading_for_several=any(len(request.ids) > 1 for request in reading),
    )


def run_workload(seed: int) -> Counter[str]:
    """Run a busy while, then let everything end; returns how often each rule was at work."""
    pair = Pair(seed)
    situations: Counter[str] = Counter()
    arrivals = (3,) if pair.is_flood else pair.rng.choice(((0, 0, 0, 1), (0, 1), (0, 1, 4)))
    for _ in range(_NUM_BUSY_STEPS):
        for _ in range(pair.rng.choice(arrivals)):
            pair.arrive()
        if pair.rng.random() < 0.1 and not pair.is_flood:
            disturb(pair)
        pair.step(failure_rate=0.05)
        situations += count_situations(pair)
    run_until_idle(pair)
    return situations


def test_every_step_of_random_workloads_agrees_with_the_simulation() -> None:
    situations: Counter[str] = Counter()
    for seed in range(_NUM_SEEDS):
        try:
            situations += run_workload(seed)
        except BaseException as error:
            error.add_note(f"workload of seed {seed}")
            raise
    # Without this, the agreement could be one of two machines with nothing to do.
    assert min(situations.values()) >= 20
    assert len(situations) == 7
