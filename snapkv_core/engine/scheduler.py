"""Which sequence does what in the next step; decides on ids and counts, without tensors."""

from collections import deque
from dataclasses import dataclass

from snapkv_core.engine.step_plan import DecodeBatch, PrefillSlice, StepPlan, StepResult
from snapkv_core.errors import QueueFullError
from snapkv_core.sequence import FinishReason, Sequence, SequenceStatus


@dataclass(slots=True)
class _PrefillProgress:
    """The prompt being read and how far it is."""

    group: tuple[Sequence, ...]
    layer_idx: int = 0
    token_offset: int = 0


class Scheduler:
    """First come, first served: one prompt is read at a time while all others decode.

    A group is the `n` sequences of one request; the first reads the prompt for all. Invariant:
    every sequence is in exactly one of waiting, prefilling and running, and at most
    `max_num_seqs` are in the latter two.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        max_num_seqs: int,
        max_num_waiting: int,
        prefill_chunk_tokens: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        self._num_layers = num_layers
        self._max_num_seqs = max_num_seqs
        self._max_num_waiting = max_num_waiting
        self._chunk = prefill_chunk_tokens
        self._eos_token_ids = eos_token_ids
        self._waiting: deque[tuple[Sequence, ...]] = deque()
        self._prefill: _PrefillProgress | None = None
        self._running: dict[int, Sequence] = {}

    @property
    def num_waiting(self) -> int:
        """Requests that have not been started."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences being read or generated."""
        return len(self._running) + (len(self._prefill.group) if self._prefill else 0)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._waiting or self._prefill or self._running)

    def add(self, group: tuple[Sequence, ...]) -> None:
        """Queue the sequences of one request.

        Raises:
            QueueFullError: As many requests wait as may wait.
        """
        # One prompt is read at a time, so requests for which there is room wait as well.
        if len(self._waiting) >= self._max_num_seqs + self._max_num_waiting:
            raise QueueFullError(len(self._waiting), retry_after_s=1.0)
        self._waiting.append(group)

    def drop(self, sequences: tuple[Sequence, ...], reason: FinishReason) -> None:
        """Take sequences out, wherever they are; those that have finished stay as they are."""
        for sequence in sequences:
            if sequence.status is SequenceStatus.FINISHED:
                continue
            sequence.finish(reason)
            self._running.pop(sequence.seq_id, None)
            if self._prefill and sequence in self._prefill.group:
                # The first sequence reads for the others, so they leave together.
                self._prefill = None
        self._waiting = deque(
            group for group in self._waiting if group[0].status is SequenceStatus.WAITING
        )

    def plan(self) -> StepPlan:
        """Decide the next step."""
        self._admit()
        decode = DecodeBatch(tuple(self._running)) if self._running else None
        return StepPlan(prefill=self._next_slices(), decode=decode)

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        """Take over a step's result: append tokens, move the cursor, finish what has ended.

        Sequences in `result.failures` must have been dropped before.
        """
        if plan.prefill and self._prefill is not None:
            self._advance(plan.prefill[-1])
        for seq_id, token_id in result.token_ids.items():
            sequence = self._running[seq_id]
            sequence.output_ids.append(token_id)
            if token_id in self._eos_token_ids and not sequence.sampling.ignore_eos:
                self.drop((sequence,), FinishReason.STOP)
            elif len(sequence.output_ids) >= sequence.max_new_tokens:
                self.drop((sequence,), FinishReason.LENGTH)

    def _admit(self) -> None:
        if self._prefill is not None or not self._waiting:
            return
        if len(self._running) + len(self._waiting[0]) > self._max_num_seqs:
            return
        group = self._waiting.popleft()
        for sequence in group:
            sequence.status = SequenceStatus.PREFILLING
        self._prefill = _PrefillProgress(group)

    def _next_slices(self) -> tuple[PrefillSlice, ...]:
        """Cut off about one chunk's worth of work, counted in tokens times layers."""
        progress = self._prefill
        if progress is None:
            return ()
        slices: list[PrefillSlice] = []
        layer_idx, token_offset, num_tokens = progress.layer_idx, progress.token_offset, 0
        while layer_idx < self._num_layers:
            part = self._slice_at(progress.group, layer_idx, token_offset)
            num_tokens += part.token_end - part.token_start
            if slices and num_tokens > self._chunk:
                break
            slices.append(part)
            layer_idx, token_offset = self._after(part, progress.group[0])
        return tuple(slices)

    def _slice_at(
        self, group: tuple[Sequence, ...], layer_idx: int, token_start: int
    ) -> PrefillSlice:
        leader, *siblings = group
        token_end = min(token_start + self._chunk, leader.num_prompt_tokens)
        is_last_chunk = token_end == leader.num_prompt_tokens
        return PrefillSlice(
            seq_id=leader.seq_id,
            layer_idx=layer_idx,
            token_start=token_start,
            token_end=token_end,
            sibling_ids=tuple(sibling.seq_id for sibling in siblings),
            is_first=layer_idx == 0 and token_start == 0,
            is_last=layer_idx == self._num_layers - 1 and is_last_chunk,
        )

    @staticmethod
    def _after(part: PrefillSlice, leader: Sequence) -> tuple[int, int]:
        """Return the layer and token that follow a slice."""
        if part.token_end == leader.num_prompt_tokens:
            return part.layer_idx + 1, 0
        return part.layer_idx, part.token_end

    def _advance(self, part: PrefillSlice) -> None:
        progress = self._prefill
        assert progress is not None, "commit() checked it"
        progress.layer_idx, progress.token_offset = self._after(part, progress.group[0])
        if part.is_last:
            for sequence in progress.group:
                sequence.status = SequenceStatus.RUNNING
                self._running[sequence.seq_id] = sequence
            self._prefill = None
