"""What a caller may ask for at most: what it names is refused, what it omits shrinks."""

from collections.abc import Mapping

from app.setting_groups.key_limits import KeyLimits
from snapkv_core import (
    ChatMessage,
    CompressionConfig,
    GenerationRequest,
    RequestSize,
    SamplingParams,
    resolve_compression,
)


class OverCeilingError(Exception):
    """A known caller asks for more than it ever may.

    Attributes:
        field: Name of the field.
        requested: What was asked for.
        ceiling: The most that this caller may ask for.
    """

    def __init__(self, field: str, reason: str, *, requested: int, ceiling: int) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.requested = requested
        self.ceiling = ceiling


def require_sampling_within(sampling: SamplingParams, limits: KeyLimits) -> None:
    """Check the length and number of the answers.

    Raises:
        OverCeilingError: One of them is above the caller's ceiling.
    """
    if sampling.max_new_tokens is not None:
        _require("max_new_tokens", sampling.max_new_tokens, limits.max_new_tokens)
    _require("n", sampling.n, limits.max_choices)


def resolve_within(
    default: CompressionConfig,
    profile: str | None,
    knobs: Mapping[str, object],
    ceiling: int | None,
) -> CompressionConfig:
    """Combine a default, a profile and knobs as `resolve_compression` does, under a ceiling.

    Args:
        default: What applies when the caller names nothing; its capacity shrinks to the ceiling.
        profile: Named set of knobs, or None.
        knobs: Explicit values by field name; None counts as absent.
        ceiling: The most prompt tokens that may be kept, or None.

    Raises:
        InvalidParameterError: A value is not acceptable.
        OverCeilingError: The capacity that the caller or its profile names is above the ceiling.
    """
    found = resolve_compression(default, profile, knobs)
    if ceiling is None or found.max_capacity_prompt <= ceiling:
        return found
    if profile is None and knobs.get("max_capacity_prompt") is None:
        return resolve_compression(default, None, {**knobs, "max_capacity_prompt": ceiling})
    _require("max_capacity_prompt", found.max_capacity_prompt, ceiling)
    return found


def prompt_field_of(request: GenerationRequest) -> str:
    """Return the name of the field that held a request's prompt."""
    is_chat = any(isinstance(part, ChatMessage) for part in request.prompt[:1])
    return "messages" if is_chat else "prompt"


def require_size_within(size: RequestSize, request: GenerationRequest, limits: KeyLimits) -> None:
    """Check the length of the prompt, and how much of it is kept where all of it is.

    Raises:
        OverCeilingError: One of them is above the caller's ceiling.
    """
    num_tokens, ceiling = size.num_prompt_tokens, limits.max_capacity_prompt
    _require(prompt_field_of(request), num_tokens, limits.max_prompt_tokens, " tokens")
    if ceiling is not None and request.compression.num_kept(num_tokens) > ceiling:
        raise OverCeilingError(
            "method",
            f"{request.compression.method} keeps all {num_tokens} tokens of the prompt; at most "
            f"{ceiling} may be kept for this caller (max_capacity_prompt)",
            requested=num_tokens,
            ceiling=ceiling,
        )


def _require(field: str, requested: int, ceiling: int | None, unit: str = "") -> None:
    if ceiling is not None and requested > ceiling:
        raise OverCeilingError(
            field,
            f"at most {ceiling}{unit} for this caller, got {requested}",
            requested=requested,
            ceiling=ceiling,
        )
