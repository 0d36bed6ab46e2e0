"""Body and answer of `POST /v1/chat/completions`."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from app.api.schemas.common import Text
from app.api.schemas.generate import MAX_MESSAGES
from app.api.schemas.logprobs import ChatLogprobs
from app.api.schemas.openai import OpenAIAnswer, OpenAIRequest
from app.services.generation import GenerationInput
from snapkv_core import ChatMessage, FinishReason, InvalidParameterError

MAX_PARTS: Final = 1_000


def _joined(content: Any) -> Any:
    """Return the text of a message that came in parts; what is none is left to the type."""
    if not isinstance(content, list):
        return content
    if not 0 < len(content) <= MAX_PARTS:
        raise ValueError(f"must have 1 to {MAX_PARTS} parts")
    texts = []
    for part in content:
        if not isinstance(part, dict) or set(part) != {"type", "text"} or part["type"] != "text":
            raise ValueError('has a part that is not {"type": "text", "text": ...}')
        if not isinstance(part["text"], str):
            raise ValueError("has a part whose text is no string")
        texts.append(part["text"])
    return "\n".join(texts)


class ChatMessageBody(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Annotated[Text, StringConstraints(min_length=1, max_length=64)] = Field(
        description="`system`, `user`, `assistant` or what else the model's template knows."
    )
    content: Annotated[Text, BeforeValidator(_joined)] = Field(
        description="What was said: text, or a list of text parts, which become lines.",
        json_schema_extra={
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": MAX_PARTS,
                    "items": {
                        "type": "object",
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                        "required": ["type", "text"],
                        "additionalProperties": False,
                    },
                },
            ]
        },
    )
    name: None = Field(None, description="Only null: templates know no names.")


class ChatCompletionRequest(OpenAIRequest):
    """A conversation to continue, as OpenAI's clients send it."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "model": "demo",
                "messages": [{"role": "user", "content": "What is the capital of France?"}],
                "max_completion_tokens": 16,
            }
        },
    )
    NEUTRAL: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **OpenAIRequest.NEUTRAL,
        "metadata": ({},),
        "modalities": (["text"],),
        "parallel_tool_calls": (True, False),
        "reasoning_effort": (),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "tool_choice": ("none",),
        "tools": ([],),
    }

    messages: Annotated[
        list[ChatMessageBody], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    ] = Field(description="Conversation to continue, through the model's chat template.")
    max_completion_tokens: int | None = Field(
        None, description="The newer name of `max_tokens`; only one of them."
    )
    logprobs: bool | None = Field(None, description="Report each token's log-probability.")
    top_logprobs: int | None = Field(
        None, description="With `logprobs`, so many of the likeliest tokens as well: 0 to 20."
    )
    metadata: Any = Field(None, description="Only empty.")
    modalities: Any = Field(None, description='Only ["text"].')
    parallel_tool_calls: Any = Field(None, description="Not used, since there are no tools.")
    reasoning_effort: Any = Field(None, description="Only null.")
    service_tier: Any = Field(None, description="Only `auto` or `default`.")
    store: Any = Field(None, description="Only false.")
    tool_choice: Any = Field(None, description="Only `none`.")
    tools: Any = Field(None, description="Only empty.")

    @property
    def num_logprobs(self) -> int | None:
        """See `OpenAIRequest.num_logprobs`."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def inputs(self) -> list[GenerationInput]:
        """See `OpenAIRequest.inputs`.

        Raises:
            InvalidParameterError: Both names of the answer's length are there, or likeliest tokens
                without log-probabilities.
        """
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidParameterError("top_logprobs", "is only for logprobs: true")
        if self.max_completion_tokens is None:
            limited = self
        elif self.max_tokens is None:
            limited = self.model_copy(update={"max_tokens": self.max_completion_tokens})
        else:
            raise InvalidParameterError(
                "max_completion_tokens", "means the same as max_tokens; send one of them"
            )
        messages = tuple(ChatMessage(message.role, message.content) for message in self.messages)
        return [limited.input_of(messages)]


class ChatAnswer(BaseModel):
    """What the model said."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatDelta(BaseModel):
    """A piece of an answer; the first one of each names the role."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(BaseModel):
    """A piece of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None = Field(description="Null until the answer's last piece.")


class ChatCompletion(OpenAIAnswer):
    """The answer of `POST /v1/chat/completions`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class ChatCompletionChunk(OpenAIAnswer):
    """A chunk of its stream."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
