"""One token stream being generated: its ids, its status and the times it passed."""

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from snapkv_core.config import CompressionConfig
from snapkv_core.sampling_params import SamplingParams


class SequenceStatus(StrEnum):
    """Where a sequence is in its life; it only ever moves down this list."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    DEADLINE = "deadline"
    ABORT = "abort"
    ERROR = "error"


class TokenConstraint(Protocol):
    """What an answer is held to, one token after another."""

    def allowed(self) -> bytes:
        """Return a byte per token of the vocabulary, 0 for those that must not come next.

        Raises:
            InvalidParameterError: None may.
        """

    def accept(self, token_id: int) -> None:
        """Go on behind a token that was allowed."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A token stream; the engine thread owns and changes it.

    Attributes:
        seq_id: Unique in the engine.
        request_id: The request it answers; the `n` choices of a request share it.
        choice_index: Which of the request's `n` answers this is.
        prompt_ids: Tokens of the prompt.
        sampling: Sampling parameters with `max_new_tokens` and `seed` filled in.
        compression: How its prompt's KV is compressed.
        tenant: Whose request it is; tenants take turns.
        explain: Whether the report names the prompt tokens that were kept.
        wants_prompt_logprobs: Whether the prompt's own tokens are reported with log-probabilities.
        constraint: What the answer is held to; None leaves it free.
        is_restored: Whether its prompt's KV comes out of a snapshot, so that no model reads it.
        output_ids: Tokens generated so far.
        status: Stage of its life.
        finish_reason: Why it ended, once it has.
        arrival_s: When it was submitted, `time.monotonic()`.
        deadline_s: When it is ended whether finished or not, on the same clock.
        prefill_start_s: When its first prefill slice began.
        first_token_s: When its first token was sampled.
    """

    seq_id: int
    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    compression: CompressionConfig
    arrival_s: float
    deadline_s: float = math.inf
    choice_index: int = 0
    tenant: str = ""
    explain: bool = False
    wants_prompt_logprobs: bool = False
    constraint: TokenConstraint | None = None
    is_restored: bool = False
    output_ids: list[int] = field(default_factory=list)
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    prefill_start_s: float | None = None
    first_token_s: float | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt, before any compression."""
        return len(self.prompt_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens seen, prompt and answer; the next token's RoPE position.

        Not the tokens stored: those are the KV cache's `kv_len`, smaller after compression.
        """
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def max_new_tokens(self) -> int:
        """Longest answer of this sequence; always filled in by the time it is queued."""
        assert self.sampling.max_new_tokens is not None, "submit() fills in max_new_tokens"
        return self.sampling.max_new_tokens

    def finish(self, reason: FinishReason) -> None:
        """End the sequence; only the first reason counts."""
        if self.status is not SequenceStatus.FINISHED:
            self.status = SequenceStatus.FINISHED
            self.finish_reason = reason
