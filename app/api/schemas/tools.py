"""Tools in the bodies of `POST /v1/chat/completions`: offered, called, and what calls look like."""

import json
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from app.api.schemas.common import Text
from snapkv_core import ToolCall

MAX_TOOLS: Final = 128
_FunctionName = Annotated[Text, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


def _require_object(text: str) -> str:
    """Return JSON text of an object as it is."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError("must be the JSON text of an object")
    return text


class FunctionDefinition(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: _FunctionName = Field(description="1 to 64 letters, digits, underscores and dashes.")
    description: Text | None = Field(None, description="What it does, for the model.")
    parameters: dict[str, Any] | None = Field(
        None, description="JSON schema of its arguments; null is any object."
    )
    strict: bool | None = Field(
        None, description="Accepted: arguments of a call that was demanded match the schema."
    )


class Tool(BaseModel):
    """A tool; all are functions."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["function"]
    function: FunctionDefinition

    def template_json(self) -> str:
        """Return what chat templates show to the model."""
        return self.model_dump_json(exclude={"function": {"strict"}}, exclude_none=True)


class ChosenFunction(BaseModel):
    """The name of a function."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: _FunctionName


class ToolChoice(BaseModel):
    """The one tool that is to be called."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["function"]
    function: ChosenFunction


class CalledFunction(BaseModel):
    """A function and what it is called with."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: _FunctionName
    arguments: Annotated[Text, AfterValidator(_require_object)] = Field(
        description="JSON text of an object."
    )


class MessageToolCall(BaseModel):
    """A call of a tool that the assistant asked for."""

    model_config = ConfigDict(extra="forbid", strict=True)

    id: Annotated[Text, StringConstraints(min_length=1, max_length=64)]
    type: Literal["function"]
    function: CalledFunction

    def to_call(self) -> ToolCall:
        """Return what the core takes."""
        return ToolCall(self.id, self.function.name, self.function.arguments)


class ToolCallDelta(MessageToolCall):
    """A call of a stream, which comes as a whole."""

    index: int = Field(description="Which of the answer's calls.")


def call_fields(call: ToolCall) -> dict[str, Any]:
    """Return a call as answers say it."""
    return {
        "id": call.call_id,
        "type": "function",
        "function": CalledFunction(name=call.name, arguments=call.arguments),
    }
