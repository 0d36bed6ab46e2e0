"""Which sequence does what in the next step; decides on ids and counts, without tensors."""

from collections.abc import Iterable

from snapkv_core.engine.memory_ledger import MemoryLedger
from snapkv_core.engine.prefill_queue import PrefillQueue
from snapkv_core.engine.slice_pacer import SlicePacer
from snapkv_core.engine.step_plan import DecodeBatch, StepPlan, StepResult
from snapkv_core.errors import KVCacheError, QueueFullError
from snapkv_core.sequence import FinishReason, Sequence, SequenceStatus


class Scheduler:
    """Tenants take turns: one prompt is read in slices while all others decode.

    A group is the `n` sequences of one request; the first reads the prompt for all. A group
    starts when each of its sequences has a place and the ledger has its memory, so that nothing
    that was started ever waits again. `PrefillQueue` holds the order of starting, in which a
    short prompt may overtake a long one that is being read, and the bounds on that.

    Slices begin and end on a grid of tokens, and every step takes as many as the pacer allows, at
    least one. How a prompt is cut changes when its first token comes, never which one it is.

    Only the engine thread calls it. Invariant, see `check_integrity`: every unfinished sequence is
    in exactly one of waiting, prefilling and running; at most `max_num_seqs` are in the latter
    two, and exactly those hold memory in the ledger.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        grid_tokens: int,
        max_slice_tokens: int,
        max_num_seqs: int,
        max_num_waiting: int,
        overtake_max_tokens: int,
        eos_token_ids: frozenset[int],
        ledger: MemoryLedger,
        pacer: SlicePacer,
    ) -> None:
        """Build an idle scheduler.

        Args:
            num_layers: Decoder layers that each prompt goes through.
            grid_tokens: Slices begin at a multiple of this, and end at one or with the prompt.
            max_slice_tokens: Most tokens of a slice, rounded down to the grid but at least one
                cell of it.
            max_num_seqs: Sequences that may be read or generated at once.
            max_num_waiting: Requests that may wait beyond those.
            overtake_max_tokens: Longest prompt that may overtake; 0 keeps strict order.
            eos_token_ids: Tokens that end an answer.
            ledger: Where memory is reserved; nobody else reserves in it.
            pacer: What says how much prefill work fits a step; it is fed from step results.
        """
        self._max_num_seqs = max_num_seqs
        self._max_num_waiting = max_num_waiting
        self._eos_token_ids = eos_token_ids
        self._ledger = ledger
        self._pacer = pacer
        self._prefills = PrefillQueue(
            num_layers=num_layers,
            grid_tokens=grid_tokens,
            max_slice_tokens=max_slice_tokens,
            overtake_max_tokens=overtake_max_tokens,
            pacer=pacer,
        )
        self._running: dict[int, Sequence] = {}

    @property
    def num_waiting(self) -> int:
        """Requests that have not been started."""
        return self._prefills.num_waiting

    @property
    def num_prefilling(self) -> int:
        """Sequences whose prompt is being read."""
        return self._prefills.num_reading

    @property
    def num_running(self) -> int:
        """Sequences being read or generated."""
        return len(self._running) + self._prefills.num_reading

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.num_waiting or self.num_running)

    def add(self, group: tuple[Sequence, ...]) -> None:
        """Queue the sequences of one request.

        Raises:
            InvalidParameterError: It could never start; it would block the queue for good.
            QueueFullError: As many requests wait as may wait, some of them this tenant's.
        """
        assert len(group) <= self._max_num_seqs, "n is checked when a request is prepared"
        self._ledger.require_possible(group, "prompt")
        # One prompt is read at a time, so requests for which there is room wait as well.
        is_full = self.num_waiting >= self._max_num_seqs + self._max_num_waiting
        if is_full and self._prefills.is_waiting(group[0].tenant):
            raise QueueFullError(self.num_waiting, retry_after_s=1.0)
        self._prefills.add(group)

    def drop(self, sequences: tuple[Sequence, ...], reason: FinishReason) -> None:
        """Take sequences out, wherever they are; those that have finished stay as they are.

        The choices of a prompt being read may go one by one, but by the next `plan` the first
        must not be gone without the others, since it reads for them.
        """
        going = [each for each in sequences if each.status is not SequenceStatus.FINISHED]
        for sequence in going:
            sequence.finish(reason)
            self._ledger.release(sequence)
        num_running = sum(self._running.pop(each.seq_id, None) is not None for each in going)
        if num_running < len(going):
            self._prefills.forget_finished()

    def expired(self, now_s: float) -> tuple[Sequence, ...]:
        """Return the unfinished sequences whose deadline has passed.

        Choices that run end one by one; before that a request ends whole.

        Args:
            now_s: The time, on the clock of `Sequence.deadline_s`.
        """
        late = [sequence for sequence in self._running.values() if sequence.deadline_s <= now_s]
        for group in (*self._prefills.reading_groups(), *self._prefills.waiting_groups()):
            if any(sequence.deadline_s <= now_s for sequence in group):
                late += group
        return tuple(late)

    def plan(self) -> StepPlan:
        """Start what may start, and decide the next step."""
        while (group := self._prefills.start_next(self._has_room)) is not None:
            self._ledger.reserve(group)
        budget_flops = self._pacer.budget_flops(has_decode=bool(self._running))
        return StepPlan(
            prefill=self._prefills.next_slices(budget_flops),
            decode=DecodeBatch(tuple(self._running)) if self._running else None,
        )

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        """Take over a step's result: append tokens, move the cursor, finish what has ended.

        Sequences in `result.failures` must have been dropped before.
        """
        self._observe(plan, result)
        if plan.prefill:
            self._run(self._prefills.advance(plan.prefill))
        for seq_id, token_id in result.token_ids.items():
            sequence = self._running[seq_id]
            sequence.output_ids.append(token_id)
            if token_id in self._eos_token_ids and not sequence.sampling.ignore_eos:
                self.drop((sequence,), FinishReason.STOP)
            elif len(sequence.output_ids) >= sequence.max_new_tokens:
                self.drop((sequence,), FinishReason.LENGTH)

    def check_integrity(self) -> None:
        """Check the invariant, and the ledger's.

        Raises:
            KVCacheError: It is broken.
        """
        reading = [sequence for group in self._prefills.reading_groups() for sequence in group]
        waiting = [sequence for group in self._prefills.waiting_groups() for sequence in group]
        _require_status(waiting, SequenceStatus.WAITING)
        _require_status(reading, SequenceStatus.PREFILLING)
        _require_status(self._running.values(), SequenceStatus.RUNNING)
        started = {sequence.seq_id for sequence in reading} | self._running.keys()
        if started != self._ledger.reserved_ids:
            odd_ids = sorted(started ^ self._ledger.reserved_ids)
            raise KVCacheError(f"sequences {odd_ids} are either started or in the ledger, not both")
        if len(started) > self._max_num_seqs:
            raise KVCacheError(f"{len(started)} sequences run in {self._max_num_seqs} places")
        if not reading and self._ledger.workspace_bytes_reserved:
            raise KVCacheError("workspace is reserved, but no prompt is being read")
        self._ledger.check_integrity()

    def _has_room(self, group: tuple[Sequence, ...]) -> bool:
        return self.num_running + len(group) <= self._max_num_seqs and self._ledger.fits(group)

    def _run(self, group: tuple[Sequence, ...]) -> None:
        """Let the choices of a prompt that has been read generate."""
        self._ledger.release_workspace(group)
        for sequence in group:
            sequence.status = SequenceStatus.RUNNING
            self._running[sequence.seq_id] = sequence

    def _observe(self, plan: StepPlan, result: StepResult) -> None:
        # The time of work that broke off in the middle says nothing about speed.
        if result.failures:
            return
        if plan.prefill:
            self._pacer.observe(self._prefills.work_flops(plan.prefill), result.prefill_s)
        if plan.decode:
            self._pacer.observe_decode(result.decode_s)


def _require_status(sequences: Iterable[Sequence], status: SequenceStatus) -> None:
    seen: set[int] = set()
    for sequence in sequences:
        if sequence.status is not status or sequence.seq_id in seen:
            raise KVCacheError(
                f"sequence {sequence.seq_id} is {sequence.status} and listed as {status}"
                + (" twice" if sequence.seq_id in seen else "")
            )
        seen.add(sequence.seq_id)
