"""Bodies of OpenAI's routes: what their clients send and read, and our knobs as extra fields."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
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
    Explanation,
    KVCacheInfo,
    Number,
    SharedFields,
    SnapshotField,
    Text,
    Usage,
    require_unicode,
)
from app.api.schemas.logprobs import CompletionLogprobs
from app.api.schemas.response_format import ResponseFormat
from app.services.inputs import GenerationInput
from snapkv_core import MAX_BIASED_TOKENS, ChatMessage, FinishReason, InvalidParameterError

#: More than any context holds; checking them must not hold up the process.
MAX_TOKEN_IDS: Final = 1 << 20
MAX_PROMPTS: Final = 128
_TOKEN_ID: Final = re.compile(r"[0-9]{1,9}")
_TOKEN_IDS: Final[dict[str, Any]] = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0},
    "minItems": 1,
    "maxItems": MAX_TOKEN_IDS,
}


def _as_prompts(value: Any) -> tuple[str | tuple[int, ...], ...]:
    """Return texts, or lists of token ids, from any of the ways in which clients send prompts."""
    if not isinstance(value, list) or not value or not isinstance(value[0], str | list):
        return (_as_prompt(value),)
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"must have at most {MAX_PROMPTS} prompts")
    return tuple(_as_prompt(one) for one in value)


def _as_prompt(value: Any) -> str | tuple[int, ...]:
    if isinstance(value, str):
        if not value:
            raise ValueError("must not be empty")
        return require_unicode(value)
    if not isinstance(value, list) or not value:
        raise ValueError("must be a text or a list of token ids, or a list of these; not empty")
    if len(value) > MAX_TOKEN_IDS:
        raise ValueError(f"must have at most {MAX_TOKEN_IDS} token ids")
    # Not isinstance: in Python true is an integer.
    if not all(type(token_id) is int and token_id >= 0 for token_id in value):
        raise ValueError("has a token id that is no integer from 0 on")
    return tuple(value)


def _as_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """Return token ids and biases from a JSON object, whose keys are texts."""
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise ValueError("must be an object of token ids and numbers")
    if len(value) > MAX_BIASED_TOKENS:
        raise ValueError(f"must have at most {MAX_BIASED_TOKENS} tokens")
    biases = []
    for name, bias in value.items():
        # isdecimal() and int() take digits of every script.
        if not (isinstance(name, str) and _TOKEN_ID.fullmatch(name)):
            raise ValueError("has a key that is no token id")
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise ValueError("has a bias that is no number")
        biases.append((int(name), bias))
    return tuple(biases)


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
        "min_p": (0,),
        "min_tokens": (0,),
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
    frequency_penalty: Number | None = Field(
        None, description="From -2 to 2: taken from a token's logit for each time it came."
    )
    presence_penalty: Number | None = Field(
        None, description="From -2 to 2: taken from the logits of tokens that came."
    )
    logit_bias: Annotated[Any, AfterValidator(_as_bias)] = Field(
        None,
        description="What is added to the logits of tokens: from -100 to 100, by token id.",
        json_schema_extra={
            "anyOf": [
                {
                    "type": "object",
                    "propertyNames": {"pattern": _TOKEN_ID.pattern},
                    "additionalProperties": {"type": "number"},
                },
                {"type": "null"},
            ]
        },
        validate_default=True,
    )
    response_format: ResponseFormat | None = Field(
        None, description="Hold the answer to JSON, or to a JSON schema."
    )
    min_p: Number | None = Field(None, description="Only 0.")
    min_tokens: int | None = Field(None, description="Only 0.")
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
        form = self.response_format
        return GenerationInput(
            prompt=prompt,
            sampling={
                "max_new_tokens": self.max_tokens,
                "temperature": 1.0 if self.temperature is None else self.temperature,
                "top_p": 1.0 if self.top_p is None else self.top_p,
                "n": 1 if self.n is None else self.n,
                "presence_penalty": self.presence_penalty or 0.0,
                "frequency_penalty": self.frequency_penalty or 0.0,
                "logit_bias": self.logit_bias,
                "logprobs": self.num_logprobs,
                "json_schema": None if form is None else form.answer_schema(),
                **self.shared_sampling(),
            },
            knobs=self.knobs(),
            profile=self.profile,
            explain=self.explain,
            may_use_snapshots=self.may_use_snapshots,
        )

    @property
    def num_logprobs(self) -> int | None:
        """Likeliest tokens that each token is reported with; None reports nothing."""
        raise NotImplementedError

    def inputs(self) -> list[GenerationInput]:
        """Return what the service takes, one for each prompt; raises what `input_of` raises."""
        raise NotImplementedError


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
        "suffix": (),
    }

    prompt: Annotated[Any, AfterValidator(_as_prompts)] = Field(
        description="Text to continue, or its token ids, or a list of several such prompts.",
        json_schema_extra={
            "anyOf": [
                {"type": "string", "minLength": 1},
                _TOKEN_IDS,
                {
                    "type": "array",
                    "items": {"type": "string", "minLength": 1},
                    "minItems": 1,
                    "maxItems": MAX_PROMPTS,
                },
                {"type": "array", "items": _TOKEN_IDS, "minItems": 1, "maxItems": MAX_PROMPTS},
            ]
        },
    )
    echo: bool | None = Field(None, description="Begin each answer with its prompt.")
    logprobs: int | None = Field(
        None,
        description="Report each token's log-probability, and this many of the likeliest ones: 0 "
        "to 20.",
    )
    best_of: int | None = Field(None, description="Only 1.")
    suffix: None = Field(None, description="Only null.")

    @property
    def num_logprobs(self) -> int | None:
        """See `OpenAIRequest.num_logprobs`."""
        return self.logprobs

    def inputs(self) -> list[GenerationInput]:
        """See `OpenAIRequest.inputs`."""
        return [replace(self.input_of(prompt), echo=bool(self.echo)) for prompt in self.prompt]


class CompletionChoice(BaseModel):
    """One answer, or a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None = Field(description="Null until the answer's last piece.")


class PromptReport(BaseModel):
    """What is known at the end of one prompt of several."""

    usage: Usage
    kv_cache: KVCacheInfo | None = Field(description="What compression did to it.")
    snapshot: SnapshotField
    explain: Explanation | None = Field(default=None, description="Only if it was asked for.")


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
    explain: Explanation | None = Field(default=None, description="Only if it was asked for.")
    prompts: list[PromptReport] | None = Field(
        default=None,
        description="With several prompts, in place of `kv_cache`, `snapshot` and `explain`.",
    )


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
