"""What a caller asked for, and the core request that becomes of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from app.services.access import ANYBODY, namespace_of
from app.services.ceilings import require_sampling_within, resolve_within
from app.setting_groups.key_limits import NO_LIMITS, KeyLimits
from snapkv_core import ChatMessage, CompressionConfig, GenerationRequest, SamplingParams


@dataclass(frozen=True, slots=True)
class GenerationInput:
    """What a caller asked for, before any check that needs the core.

    Attributes:
        prompt: Raw text, token ids, or messages for the chat template.
        sampling: Given values by field name of `SamplingParams`.
        knobs: Given values by field name of `CompressionConfig`; None counts as absent.
        profile: Named set of knobs that the given ones win over.
        explain: Whether the report says which prompt tokens were kept.
        tools: JSON texts of the tools that the chat template may offer the model.
        echo: Whether each answer begins with the prompt.
        timeout_s: Seconds the caller waits at most; None takes the server's limit, which also
            bounds a longer one.
        may_use_snapshots: Whether its prompt may be looked up in a store, and stored.
        caller: Name of who asks; others' snapshots are not found.
    """

    prompt: str | tuple[int, ...] | tuple[ChatMessage, ...]
    sampling: Mapping[str, object] = field(default_factory=dict)
    knobs: Mapping[str, object] = field(default_factory=dict)
    profile: str | None = None
    explain: bool = False
    tools: tuple[str, ...] = ()
    echo: bool = False
    timeout_s: float | None = None
    may_use_snapshots: bool = True
    caller: str = ANYBODY


def to_request(
    request_id: str,
    given: GenerationInput,
    default_compression: CompressionConfig,
    limits: KeyLimits = NO_LIMITS,
) -> GenerationRequest:
    """Check a caller's values and complete them.

    Raises:
        InvalidParameterError: A value is out of range; names the field.
        OverCeilingError: A value is above the caller's ceiling; names the field.
    """
    sampling = SamplingParams(**given.sampling)  # type: ignore[arg-type]  # checked inside
    require_sampling_within(sampling, limits)
    return GenerationRequest(
        request_id=request_id,
        prompt=given.prompt,
        sampling=sampling,
        compression=resolve_within(
            default_compression, given.profile, given.knobs, limits.max_capacity_prompt
        ),
        explain=given.explain,
        tools=given.tools,
        echo=given.echo,
        timeout_s=given.timeout_s,
        tenant=given.caller,
        max_default_new_tokens=limits.max_new_tokens,
        snapshot_namespace=namespace_of(given.caller) if given.may_use_snapshots else None,
    )
