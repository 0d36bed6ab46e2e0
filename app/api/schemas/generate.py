"""Request and answer of `POST /generate`; types here, ranges in the core's own classes."""

from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from app.api.schemas.common import (
    Explanation,
    KVCacheInfo,
    Number,
    SharedFields,
    SnapshotField,
    Text,
    Usage,
    explanation_of,
    kv_cache_of,
    usage_of,
)
from app.services.answers import GenerationResult
from app.services.inputs import GenerationInput
from snapkv_core import ChatMessage, FinishReason, InvalidParameterError, RequestSummary

#: Rendering more than this through a template holds up the process for seconds.
MAX_MESSAGES: Final = 10_000


class MessageBody(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Annotated[Text, StringConstraints(min_length=1, max_length=64)] = Field(
        description="`system`, `user`, `assistant` or what else the model's template knows."
    )
    content: Text = Field(description="What was said.")


# fail_fast: reporting each of a million wrong items would hold up the process for seconds.
Messages = Annotated[
    list[MessageBody], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
]


class GenerateRequest(SharedFields):
    """A prompt, how to continue it and how to compress its KV cache."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "prompt": "The capital of France is",
                "max_new_tokens": 16,
                "max_capacity_prompt": 1024,
                "window_size": 32,
                "kernel_size": 7,
            }
        },
    )

    prompt: Annotated[Text, StringConstraints(min_length=1)] | None = Field(
        None, description="Text to continue; exactly one of `prompt` and `messages`."
    )
    messages: Messages | None = Field(
        None, description="Conversation to continue, through the model's chat template."
    )
    max_new_tokens: int | None = Field(
        None, description="Longest answer in tokens; null takes the server's default."
    )
    temperature: Number = Field(0.0, description="0 is greedy; randomness grows with it.")
    top_p: Number = Field(
        1.0, description="Sample from the smallest set of tokens with this probability."
    )
    n: int = Field(1, description="Answers to generate.")
    stream: bool = Field(False, description="Answer with server-sent events.")

    def to_input(self) -> GenerationInput:
        """Return what the service takes.

        Raises:
            InvalidParameterError: Not exactly one of `prompt` and `messages` was given.
        """
        if (self.prompt is None) == (self.messages is None):
            raise InvalidParameterError(
                "prompt", "exactly one of prompt and messages must be given"
            )
        messages = tuple(ChatMessage(m.role, m.content) for m in self.messages or ())
        return GenerationInput(
            prompt=messages if self.prompt is None else self.prompt,
            sampling={
                "max_new_tokens": self.max_new_tokens,
                "temperature": self.temperature,
                "top_p": self.top_p,
                "n": self.n,
                **self.shared_sampling(),
            },
            knobs=self.knobs(),
            profile=self.profile,
            explain=self.explain,
            may_use_snapshots=self.may_use_snapshots,
        )


class Timings(BaseModel):
    """Measured times in milliseconds."""

    queue_ms: float
    prefill_ms: float
    decode_ms: float
    time_to_first_token_ms: float
    total_ms: float


class Choice(BaseModel):
    """One of several answers; `text` is absent in a stream, which sent it already."""

    index: int
    text: str = ""
    finish_reason: FinishReason


class Outcome(BaseModel):
    """What is known when a request has ended: the common part of an answer and a last event."""

    id: str = Field(
        description="Name of the request: its X-Request-Id, with a suffix while that is in use."
    )
    model: str
    text: str = Field(description="The answer, the first one if there are several.")
    finish_reason: FinishReason
    usage: Usage
    kv_cache: KVCacheInfo | None
    snapshot: SnapshotField
    timings: Timings
    explain: Explanation | None = Field(default=None, description="Only if it was asked for.")
    choices: list[Choice] | None = Field(default=None, description="Only if `n` is above 1.")


class GenerateResponse(Outcome):
    """The answer of `POST /generate`."""


class StreamPiece(BaseModel):
    """An event of a stream: some new text of one answer."""

    id: str
    index: int = Field(default=0, description="Which of the answers; only if `n` is above 1.")
    text: str
    finish_reason: FinishReason | None = Field(
        default=None, description="On the last piece of an answer; only if `n` is above 1."
    )


def to_response(result: GenerationResult) -> GenerateResponse:
    """Build the JSON answer; fields that do not apply are left unset."""
    choices = [
        Choice(index=choice.index, text=choice.text, finish_reason=choice.finish_reason)
        for choice in result.choices
    ]
    return GenerateResponse(
        text=result.choices[0].text,
        **_outcome_fields(result.request_id, result.model, result.summaries[0]),
        **({"choices": choices} if len(choices) > 1 else {}),
    )


def to_last_event(request_id: str, model: str, summary: RequestSummary) -> Outcome:
    """Build the last event of a stream, whose text was sent before."""
    choices = [
        Choice(index=index, finish_reason=reason)
        for index, reason in enumerate(summary.finish_reasons)
    ]
    return Outcome(
        text="",
        **_outcome_fields(request_id, model, summary),
        **({"choices": choices} if len(choices) > 1 else {}),
    )


def _outcome_fields(request_id: str, model: str, summary: RequestSummary) -> dict[str, Any]:
    timings, report = summary.timings, summary.compression
    fields: dict[str, Any] = {
        "id": request_id,
        "model": model,
        "finish_reason": summary.finish_reasons[0],
        "usage": usage_of(summary.num_prompt_tokens, summary.num_output_tokens),
        "kv_cache": kv_cache_of(report),
        "snapshot": summary.snapshot,
        "timings": Timings(
            queue_ms=timings.queue_ms,
            prefill_ms=timings.prefill_ms,
            decode_ms=timings.decode_ms,
            time_to_first_token_ms=timings.time_to_first_token_ms,
            total_ms=timings.total_ms,
        ),
    }
    if (explanation := explanation_of(report)) is not None:
        fields["explain"] = explanation
    return fields
