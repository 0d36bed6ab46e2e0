"""What is known of a generation that ended, for logs, metrics, traces and the request log."""

from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from snapkv_core import (
    CompressionConfig,
    CompressionReport,
    FinishReason,
    RequestTimings,
    SnapshotUse,
)


@dataclass(frozen=True, slots=True)
class GenerationRecord:
    """A request that was admitted and has ended, whatever became of it. It holds no text.

    Attributes:
        request_id: Name of the request.
        trace_id: Trace it belongs to; None when it is not traced.
        model: Name of the model.
        started_at: When it was submitted, with its time zone.
        num_choices: Answers asked for.
        num_prompt_tokens: Tokens of the prompt.
        num_output_tokens: Tokens generated, all answers together.
        finish_reason: That of the first answer, or how the request failed.
        knobs: How its prompt was to be compressed.
        compression: What that did; None when the prompt was never read to its end.
        timings: What the engine measured; None for a request that has no whole answer.
        duration_ms: Submission until the end.
        time_to_first_token_ms: Submission until the first token; None when there was none.
        snapshot: What a snapshot did for it.
        lookup_ms: What looking for one took, a part of the queue; 0 when none was looked for.
    """

    request_id: str
    trace_id: str | None
    model: str
    started_at: datetime
    num_choices: int
    num_prompt_tokens: int
    num_output_tokens: int
    finish_reason: FinishReason
    knobs: CompressionConfig
    compression: CompressionReport | None
    timings: RequestTimings | None
    duration_ms: float
    time_to_first_token_ms: float | None
    snapshot: SnapshotUse = "off"
    lookup_ms: float = 0.0


class RecordSink(Protocol):
    """Takes the record of each generation that ended."""

    def on_generation(self, record: GenerationRecord) -> None:
        """Take a record, on the event loop and in the request's context; must not block."""
