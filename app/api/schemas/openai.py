"""Bodies of OpenAI's routes: what their clients send and read, and our knobs as extra fields."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
)

from app.api.schemas.common import (
    KVCacheInfo,
    Number,
    SharedFields,
    SnapshotField,
    Text,
    Usage,
    require_unicode,
)
from app.services.generation import GenerationInput
from snapkv_core import ChatMessage, FinishReason, InvalidParameterError

#: More than any context holds; checking them must not hold up the process.
MAX_TOKEN_IDS: Final = 1 << 20
_TOKEN_IDS: Final[dict[str, Any]] = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0},
    "minItems": 1,
    "maxItems": MAX_TOKEN_IDS,
}


def _one_prompt(value: Any) -> str | tuple[int, ...]:
    """Return a text, or token ids, from any of the ways in which clients send one prompt."""
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise ValueError("must be one prompt; send a request for each")
        value = value[0]
    if isinstance(value, str):
        if not value:
            raise ValueError("must not be empty")
        return require_unicode(value)
    if not isinstance(value, list) or not value:
        raise ValueError("must be a text or a list of token ids, and not empty")
    if len(value) > MAX_TOKEN_IDS:
        raise ValueError(f"must have at most {MAX_TOKEN_IDS} token ids")
    # Not isinstance: in Python true is an integer.
    if not all(type(token_id) is int and token_id >= 0 for token_id in value):
        raise ValueError("has a token id that is no integer from 0 on")
    return tuple(value)


class StreamOptions(BaseModel):
    """What a stream says beside the text."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = Field(
        False,
        description="Send a last chunk without choices, with `usage`, `kv_cache` and `snapshot`.",
    )
    continuous_usage_stats: bool = Field(
        False, description="Send the usage so far with every chunk; needs `include_usage`."
    )


class OpenAIRequest(SharedFields):
    """What the bodies of OpenAI's routes have in common.

    Attributes:
        NEUTRAL: Fields that clients and load tools send out of habit, and the values beside null
            that ask for nothing; any other would be ignored, which is worse than refused.
    """

    NEUTRAL: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "frequency_penalty": (0,),
        "logit_bias": ({},),
        "min_p": (0,),
        "min_tokens": (0,),
        "presence_penalty": (0,),
        "repetition_penalty": (1,),
    }

    model: Text = Field(description="Name of the served model; `GET /v1/models` lists it.")
    max_tokens: int | None = Field(
        None, description="Longest answer in tokens; null takes the server's default."
    )
    temperature: Number | None = Field(None, description="0 is greedy; null is 1.")
    top_p: Number | None = Field(
        None, description="Sample from the smallest set of tokens with this probability."
    )
    n: int | None = Field(None, description="Answers to generate; null is 1.")
    stream: bool | None = Field(None, description="Answer with server-sent events.")
    stream_options: StreamOptions | None = Field(None, description="Only for a stream.")
    user: Text | None = Field(None, description="Accepted and not used.")
    frequency_penalty: Number | None = Field(None, description="Only 0.")
    logit_bias: dict[str, Any] | None = Field(None, description="Only empty.")
    min_p: Number | None = Field(None, description="Only 0.")
    min_tokens: int | None = Field(None, description="Only 0.")
    presence_penalty: Number | None = Field(None, description="Only 0.")
    repetition_penalty: Number | None = Field(None, description="Only 1.")

    @field_validator("*", mode="before")
    @classmethod
    def _require_neutral(cls, value: Any, info: ValidationInfo) -> Any:
        neutral = cls.NEUTRAL.get(info.field_name or "")
        if neutral is None or value is None:
            return value
        # In Python false is 0 and true is 1; in JSON they are not.
        if any(
            value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral
        ):
            return value
        hint = "".join(f" or {json.dumps(one)}" for one in neutral)
        raise ValueError(f"is not supported; leave it out or send null{hint}")

    def input_of(self, prompt: str | tuple[int, ...] | tuple[ChatMessage, ...]) -> GenerationInput:
        """Return what the service takes.

        Raises:
            InvalidParameterError: There are options of a stream and no stream.
        """
        if self.stream_options is not None and not self.stream:
            raise InvalidParameterError("stream_options", "is only for stream: true")
        return GenerationInput(
            prompt=prompt,
            sampling={
                "max_new_tokens": self.max_tokens,
                "temperature": 1.0 if self.temperature is None else self.temperature,
                "top_p": 1.0 if self.top_p is None else self.top_p,
                "n": 1 if self.n is None else self.n,
                **self.shared_sampling(),
            },
            knobs=self.knobs(),
            profile=self.profile,
            may_use_snapshots=self.may_use_snapshots,
        )


class CompletionRequest(OpenAIRequest):
    """A prompt to continue, as OpenAI's clients send it."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {"model": "demo", "prompt": "The capital of France is", "max_tokens": 16}
        },
    )
    NEUTRAL: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **OpenAIRequest.NEUTRAL,
        "best_of": (1,),
        "echo": (False,),
        "logprobs": (),
        "suffix": (),
    }

    prompt: Annotated[Any, AfterValidator(_one_prompt)] = Field(
        description="Text to continue, or its token ids; a list of one prompt is that prompt.",
        json_schema_extra={
            "anyOf": [
                {"type": "string", "minLength": 1},
                _TOKEN_IDS,
                {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 1},
                {"type": "array", "items": _TOKEN_IDS, "minItems": 1, "maxItems": 1},
            ]
        },
    )
    best_of: int | None = Field(None, description="Only 1.")
    echo: bool | None = Field(None, description="Only false.")
    logprobs: None = Field(None, description="Only null.")
    suffix: None = Field(None, description="Only null.")

    def to_input(self) -> GenerationInput:
        """Return what the service takes; see `input_of`."""
        return self.input_of(self.prompt)


class CompletionChoice(BaseModel):
    """One answer, or a piece of it."""

    index: int
    text: str
    logprobs: None
    finish_reason: FinishReason | None = Field(description="Null until the answer's last piece.")


class OpenAIAnswer(BaseModel):
    """What answers and chunks of OpenAI's routes have in common."""

    id: str = Field(description="The request's X-Request-Id, with a suffix while that is in use.")
    object: str
    created: int = Field(description="When it was asked for, seconds since 1970.")
    model: str
    choices: list[Any]
    usage: Usage | None = Field(default=None, description="In a stream only if asked for.")
    kv_cache: KVCacheInfo | None = Field(
        default=None, description="What compression did to the prompt; no field of OpenAI's."
    )
    snapshot: SnapshotField | None = Field(default=None)


class Completion(OpenAIAnswer):
    """The answer of `POST /v1/completions`, and every chunk of its stream."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class Model(BaseModel):
    """A model that can be asked."""

    id: str
    object: Literal["model"]
    created: int = Field(description="When it was ready, seconds since 1970.")
    owned_by: str
    max_model_len: int = Field(description="Tokens that prompt and answer may have together.")


class ModelList(BaseModel):
    """The one model that is served."""

    object: Literal["list"]
    data: list[Model]
