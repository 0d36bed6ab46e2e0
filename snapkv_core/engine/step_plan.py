"""Messages between scheduler and model runner: ids and counts, no tensors."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from snapkv_core.events import StepStats
from snapkv_core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PrefillSlice:
    """One token chunk of one prompt through one layer.

    Attributes:
        seq_id: The sequence whose prompt is read.
        layer_idx: Layer that the chunk goes through.
        token_start: First token of the chunk.
        token_end: Token after its last.
        sibling_ids: Further choices of the same request, given copies of the KV at the end.
        is_first: Whether reading of the prompt begins here.
        is_last: Whether it ends here, so that the first token is sampled.
        is_restore: Whether the prompt's KV is taken from a snapshot instead; such a slice stands
            for the whole prompt and no layer runs.
    """

    seq_id: int
    layer_idx: int
    token_start: int
    token_end: int
    sibling_ids: tuple[int, ...]
    is_first: bool
    is_last: bool
    is_restore: bool = False

    @property
    def touched_ids(self) -> tuple[int, ...]:
        """Every sequence that fails when this slice fails."""
        return (self.seq_id, *self.sibling_ids)


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Sequences that each get their next token.

    Attributes:
        seq_ids: One per row.
    """

    seq_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one engine step runs: some slices of one prompt, at most one decode batch.

    The scheduler builds it, the model runner reads it, nobody changes it.

    Attributes:
        prefill: Consecutive slices of one prompt, together about one chunk of tokens: a short
            prompt goes through many layers in a step, a long one through a part of one.
        decode: Sequences that each get their next token.
    """

    prefill: tuple[PrefillSlice, ...]
    decode: DecodeBatch | None


@dataclass(frozen=True, slots=True)
class RawLogprobs:
    """What the model thought of one position, by token ids.

    Attributes:
        token_id: The token that is there.
        logprob: Natural logarithm of its probability.
        top: The likeliest tokens with theirs, the likeliest first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class StepFailure:
    """Why a sequence cannot go on.

    Attributes:
        reason: What went wrong, fit for being sent to the caller.
        field: The parameter that asked for what cannot be done; None when it is not the caller's.
    """

    reason: str
    field: str | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave.

    Attributes:
        token_ids: Next token of each sequence that got one.
        failures: What went wrong, for each sequence that cannot go on.
        prefill_s: Seconds that the prefill slices took.
        decode_s: Seconds that the decode batch took.
        logprobs: What the model thought where such a token is, for sequences that asked.
    """

    token_ids: Mapping[int, int] = field(default_factory=dict)
    failures: Mapping[int, StepFailure] = field(default_factory=dict)
    prefill_s: float = 0.0
    decode_s: float = 0.0
    logprobs: Mapping[int, RawLogprobs] = field(default_factory=dict)


def step_stats(plan: StepPlan, result: StepResult, num_layers: int, duration_s: float) -> StepStats:
    """Return what observers are told of a step."""
    num_read = sum(
        part.token_end - part.token_start for part in plan.prefill if not part.is_restore
    )
    return StepStats(
        duration_s=duration_s,
        prefill_s=result.prefill_s,
        decode_s=result.decode_s,
        num_prefill_tokens=num_read / num_layers,
        num_decoded=len(plan.decode.seq_ids) if plan.decode else 0,
    )


def whole_prompt(sequence: Sequence, num_layers: int, slice_tokens: int) -> Iterator[PrefillSlice]:
    """Cut the prompt of one sequence into slices, for reading it in one go."""
    num_tokens = sequence.num_prompt_tokens
    for layer_idx in range(num_layers):
        for start in range(0, num_tokens, slice_tokens):
            end = min(start + slice_tokens, num_tokens)
            yield PrefillSlice(
                seq_id=sequence.seq_id,
                layer_idx=layer_idx,
                token_start=start,
                token_end=end,
                sibling_ids=(),
                is_first=layer_idx == 0 and start == 0,
                is_last=layer_idx == num_layers - 1 and end == num_tokens,
            )
