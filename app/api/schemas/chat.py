"""Body and answer of `POST /v1/chat/completions`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    model_validator,
)

from app.api.schemas.common import Text
from app.api.schemas.generate import MAX_MESSAGES
from app.api.schemas.logprobs import ChatLogprobs
from app.api.schemas.openai import OpenAIAnswer, OpenAIRequest
from app.api.schemas.tools import MAX_TOOLS, MessageToolCall, Tool, ToolCallDelta, ToolChoice
from app.services.inputs import GenerationInput
from app.services.tool_calls import forcing_schema
from snapkv_core import ChatMessage, FinishReason, InvalidParameterError

MAX_PARTS: Final = 1_000
#: Why an answer ended; with calls of tools, where an end token came after them, `tool_calls`.
ChatFinishReason = FinishReason | Literal["tool_calls"]


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
    content: Annotated[Text | None, BeforeValidator(_joined)] = Field(
        None,
        description="What was said: text, or a list of text parts, which become lines; null beside "
        "`tool_calls`.",
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
                {"type": "null"},
            ]
        },
    )
    name: None = Field(None, description="Only null: templates know no names.")
    tool_calls: (
        Annotated[list[MessageToolCall], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]
        | None
    ) = Field(None, description="Calls that the assistant asked for.")
    tool_call_id: Annotated[Text, StringConstraints(min_length=1, max_length=64)] | None = Field(
        None, description="The call that a tool answers."
    )

    @model_validator(mode="after")
    def _require_something(self) -> "ChatMessageBody":
        if self.content is None and self.tool_calls is None:
            raise ValueError("has neither content nor tool_calls")
        return self

    def to_message(self) -> ChatMessage:
        """Return what the core takes."""
        calls = tuple(call.to_call() for call in self.tool_calls or ())
        return ChatMessage(self.role, self.content, calls, self.tool_call_id)


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
        "reasoning_effort": (),
        "service_tier": ("auto", "default"),
        "store": (False,),
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
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = Field(
        None, description="Functions that the model may call, where its chat template knows tools."
    )
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = Field(
        None, description="Whether it must call one, or which one; null is `auto`."
    )
    parallel_tool_calls: bool | None = Field(
        None, description="`false`: of several calls in an answer only the first is reported."
    )
    reasoning_effort: Any = Field(None, description="Only null.")
    service_tier: Any = Field(None, description="Only `auto` or `default`.")
    store: Any = Field(None, description="Only false.")

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
        given = limited.input_of(tuple(message.to_message() for message in self.messages))
        if not (tools := self.offered_tools):
            return [given]
        given = replace(given, tools=tuple(tool.template_json() for tool in tools))
        if self.forced_tools:
            forced = [(tool.function.name, tool.function.parameters) for tool in self.forced_tools]
            sampling = {**given.sampling, "json_schema": forcing_schema(forced)}
            given = replace(given, sampling=sampling)
        return [given]

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the model is told of.

        Raises:
            InvalidParameterError: Tools, their choice and the form of the answer do not agree.
        """
        choice, tools = self.tool_choice, self.tools or []
        if not tools and choice not in (None, "none"):
            raise InvalidParameterError("tool_choice", "is only for a request with tools")
        if choice == "none":
            return []
        if len({tool.function.name for tool in tools}) < len(tools):
            raise InvalidParameterError("tools", "two of them have the same name")
        if tools and self.response_format is not None and self.response_format.type != "text":
            raise InvalidParameterError("response_format", "cannot be used with tools")
        return tools

    @property
    def forced_tools(self) -> list[Tool]:
        """The tools of which one has to be called; none where the model is free.

        Raises:
            InvalidParameterError: The chosen one is not offered.
        """
        if not isinstance(self.tool_choice, ToolChoice):
            return self.offered_tools if self.tool_choice == "required" else []
        name = self.tool_choice.function.name
        chosen = [tool for tool in self.offered_tools if tool.function.name == name]
        if not chosen:
            raise InvalidParameterError("tool_choice", f"no tool has the name {name!r}")
        return chosen


class ChatAnswer(BaseModel):
    """What the model said."""

    role: Literal["assistant"]
    content: str | None = Field(description="Null where the model only calls tools.")
    refusal: None
    tool_calls: list[MessageToolCall] | None = Field(
        default=None, description="Absent where it calls none."
    )


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason


class ChatDelta(BaseModel):
    """A piece of an answer; the first one of each names the role."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(BaseModel):
    """A piece of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None = Field(
        description="Null until the answer's last piece."
    )


class ChatCompletion(OpenAIAnswer):
    """The answer of `POST /v1/chat/completions`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class ChatCompletionChunk(OpenAIAnswer):
    """A chunk of its stream."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
