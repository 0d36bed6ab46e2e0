"""Bodies of OpenAI's routes: what their clients send and read, and our knobs as extra fields."""

import json
from typing import Annotated, Any, Final, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
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
)
from app.services.generation import GenerationInput
from snapkv_core import FinishReason, InvalidParameterError

#: Fields that clients and load tools send out of habit -> the one value, beside null, that asks
#: for nothing; any other would be ignored, which is worse than refused.
_NEUTRAL: Final[dict[str, object]] = {
    "best_of": 1,
    "echo": False,
    "frequency_penalty": 0,
    "logit_bias": {},
    "logprobs": None,
    "min_p": 0,
    "min_tokens": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "suffix": None,
}


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


class CompletionRequest(SharedFields):
    """A prompt to continue, as OpenAI's clients send it."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {"model": "demo", "prompt": "The capital of France is", "max_tokens": 16}
        },
    )

    model: Text = Field(description="Name of the served model; `GET /v1/models` lists it.")
    prompt: Annotated[Text, StringConstraints(min_length=1)] = Field(
        description="Text to continue."
    )
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
    best_of: int | None = Field(None, description="Only 1.")
    echo: bool | None = Field(None, description="Only false.")
    frequency_penalty: Number | None = Field(None, description="Only 0.")
    logit_bias: dict[str, Any] | None = Field(None, description="Only empty.")
    logprobs: None = Field(None, description="Only null.")
    min_p: Number | None = Field(None, description="Only 0.")
    min_tokens: int | None = Field(None, description="Only 0.")
    presence_penalty: Number | None = Field(None, description="Only 0.")
    repetition_penalty: Number | None = Field(None, description="Only 1.")
    suffix: None = Field(None, description="Only null.")

    @field_validator(*_NEUTRAL, mode="before")
    @classmethod
    def _require_neutral(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None, "a field's validator is told its field"
        neutral = _NEUTRAL[info.field_name]
        # In Python false is 0 and true is 1; in JSON they are not.
        is_neutral = value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
        if value is None or is_neutral:
            return value
        hint = "" if neutral is None else f" or {json.dumps(neutral)}"
        raise ValueError(f"is not supported; leave it out or send null{hint}")

    def to_input(self) -> GenerationInput:
        """Return what the service takes.

        Raises:
            InvalidParameterError: There are options of a stream and no stream.
        """
        if self.stream_options is not None and not self.stream:
            raise InvalidParameterError("stream_options", "is only for stream: true")
        return GenerationInput(
            prompt=self.prompt,
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


class CompletionChoice(BaseModel):
    """One answer, or a piece of it."""

    index: int
    text: str
    logprobs: None
    finish_reason: FinishReason | None = Field(description="Null until the answer's last piece.")


class Completion(BaseModel):
    """The answer of `POST /v1/completions`, and every chunk of its stream."""

    id: str = Field(description="The request's X-Request-Id, with a suffix while that is in use.")
    object: Literal["text_completion"]
    created: int = Field(description="When it was asked for, seconds since 1970.")
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = Field(default=None, description="In a stream only if asked for.")
    kv_cache: KVCacheInfo | None = Field(
        default=None, description="What compression did to the prompt; no field of OpenAI's."
    )
    snapshot: SnapshotField | None = Field(default=None)


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
