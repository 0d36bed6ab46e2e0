"""What the playground has to know of the server: names, ranges and defaults of what it offers."""

from typing import Final

from pydantic import BaseModel

from app.services.ports import GenerationEngine
from snapkv_core import (
    COMPRESSION_METHODS,
    MAX_CAPACITY_PROMPT,
    MAX_KERNEL_SIZE,
    MAX_WINDOW_SIZE,
    POOLINGS,
    PROFILES,
    CompressionConfig,
    SamplingParams,
)

#: The least values that the core's own checks let pass, and the most of a temperature.
MIN_CAPACITY_PROMPT: Final = 2
MIN_WINDOW_SIZE: Final = 1
MIN_KERNEL_SIZE: Final = 1
MIN_NEW_TOKENS: Final = 1
MAX_TEMPERATURE: Final = 100.0


class Choices(BaseModel):
    """A field that takes one of several words."""

    choices: list[str]
    default: str


class Span(BaseModel):
    """A field that takes a number."""

    minimum: float
    maximum: float
    default: float


class KnobValues(BaseModel):
    """Values of the knobs of compression."""

    method: str
    max_capacity_prompt: int
    window_size: int
    kernel_size: int
    pooling: str


class PlaygroundConfig(BaseModel):
    """What the page builds its controls from; fields are named as in `POST /generate`."""

    model: str
    max_model_len: int
    knobs: dict[str, Choices | Span]
    sampling: dict[str, Span]
    profiles: dict[str, KnobValues]


def playground_config(engine: GenerationEngine, default: CompressionConfig) -> PlaygroundConfig:
    """Describe what a server takes.

    Args:
        engine: Its engine.
        default: How it compresses prompts of requests that say nothing.
    """
    limits = engine.config
    return PlaygroundConfig(
        model=engine.model_name,
        max_model_len=engine.max_model_len,
        knobs={
            "method": Choices(choices=list(COMPRESSION_METHODS), default=default.method),
            "max_capacity_prompt": Span(
                minimum=MIN_CAPACITY_PROMPT,
                maximum=MAX_CAPACITY_PROMPT,
                default=default.max_capacity_prompt,
            ),
            "window_size": Span(
                minimum=MIN_WINDOW_SIZE, maximum=MAX_WINDOW_SIZE, default=default.window_size
            ),
            "kernel_size": Span(
                minimum=MIN_KERNEL_SIZE, maximum=MAX_KERNEL_SIZE, default=default.kernel_size
            ),
            "pooling": Choices(choices=list(POOLINGS), default=default.pooling),
        },
        sampling={
            "max_new_tokens": Span(
                minimum=MIN_NEW_TOKENS,
                maximum=limits.max_new_tokens_limit,
                default=limits.default_max_new_tokens,
            ),
            "temperature": Span(
                minimum=0.0, maximum=MAX_TEMPERATURE, default=SamplingParams().temperature
            ),
        },
        profiles={name: _values_of(knobs) for name, knobs in PROFILES.items()},
    )


def _values_of(knobs: CompressionConfig) -> KnobValues:
    return KnobValues(
        method=knobs.method,
        max_capacity_prompt=knobs.max_capacity_prompt,
        window_size=knobs.window_size,
        kernel_size=knobs.kernel_size,
        pooling=knobs.pooling,
    )
