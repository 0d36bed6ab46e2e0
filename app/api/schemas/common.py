"""What the bodies of `/generate` and of OpenAI's routes have in common."""

import base64
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from snapkv_core import (
    COMPRESSION_METHODS,
    POOLINGS,
    PROFILES,
    CompressionReport,
    SnapshotUse,
)


def require_unicode(text: str) -> str:
    """Return a text that can be encoded; raises `ValueError` for any other."""
    # JSON can spell half a surrogate pair; no tokenizer and no UTF-8 answer can.
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("must be valid Unicode text, without lone surrogates") from None
    return text


def _as_list(value: Any) -> Any:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) or value is None:
        return value
    raise ValueError("must be a string or a list of strings")


Text = Annotated[str, AfterValidator(require_unicode)]
Number = Annotated[float, Field(allow_inf_nan=False)]


class SharedFields(BaseModel):
    """Fields that mean the same on every route that generates."""

    model_config = ConfigDict(extra="forbid", strict=True)

    top_k: int = Field(0, description="Sample from this many likeliest tokens; 0 is no limit.")
    seed: int | None = Field(
        None, description="Same seed, same answer; null draws one per request."
    )
    stop: Annotated[list[Text], Field(fail_fast=True), BeforeValidator(_as_list)] | None = Field(
        None,
        description="String or strings that end the answer; it contains none of them.",
        json_schema_extra={
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                {"type": "null"},
            ]
        },
    )
    ignore_eos: bool = Field(False, description="Go on after an end-of-sequence token.")
    method: str | None = Field(
        None,
        description="Compression method.",
        json_schema_extra={"enum": [*COMPRESSION_METHODS, None]},
    )
    max_capacity_prompt: int | None = Field(
        None, description="Prompt tokens kept per layer and KV head, the window counted in."
    )
    window_size: int | None = Field(
        None, description="Last prompt tokens, which score the rest and are always kept."
    )
    kernel_size: int | None = Field(
        None, description="Width of the pooling over scores, odd; 1 turns it off."
    )
    pooling: str | None = Field(
        None, description="Kind of pooling.", json_schema_extra={"enum": [*POOLINGS, None]}
    )
    profile: str | None = Field(
        None,
        description="Named set of compression knobs; knobs given beside it win.",
        json_schema_extra={"enum": [*PROFILES, None]},
    )
    explain: bool = Field(False, description="Report which prompt tokens were kept.")
    snapshot: Literal["auto", "off"] = Field(
        "auto",
        description="Whether a stored snapshot of the prompt may be used and one be stored; `off` "
        "keeps the prompt out of every store.",
    )

    def shared_sampling(self) -> dict[str, object]:
        """Return what goes into `SamplingParams`, by its field names."""
        return {
            "top_k": self.top_k,
            "seed": self.seed,
            "stop": tuple(self.stop or ()),
            "ignore_eos": self.ignore_eos,
        }

    @property
    def may_use_snapshots(self) -> bool:
        """Whether the prompt may be looked up in a store, and stored."""
        return self.snapshot == "auto"

    def knobs(self) -> dict[str, object]:
        """Return what goes into `CompressionConfig`, by its field names; None is absent."""
        return {
            "method": self.method,
            "max_capacity_prompt": self.max_capacity_prompt,
            "window_size": self.window_size,
            "kernel_size": self.kernel_size,
            "pooling": self.pooling,
        }


#: What a snapshot did for a request, as answers say it.
SnapshotField = Annotated[
    SnapshotUse,
    Field(
        description="`hit`: reading the prompt was spared; `stored`: it was read and is being "
        "stored; `miss`: it was read; `off`: it was not looked up."
    ),
]


class Usage(BaseModel):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int = Field(description="Sum over all answers.")
    total_tokens: int


class KVCacheInfo(BaseModel):
    """What compression did to the prompt's KV cache."""

    method: str
    original_entries: int = Field(description="Tokens per layer and KV head before.")
    compressed_entries: float = Field(description="The same after; a mean where they differ.")
    compression_ratio: float = Field(description="Original over compressed; 20 is 20 times less.")
    original_bytes: int
    compressed_bytes: int
    kept_attention_mass: float = Field(
        description="Share of the window's attention to the prefix that kept tokens hold."
    )
    skipped: str | None = Field(description="Why nothing was dropped, or null.")


class Explanation(BaseModel):
    """Which prompt tokens were kept."""

    num_kv_heads: int = Field(description="The most a byte of `layer_kept_counts` can be.")
    kept_counts: list[int] = Field(
        description="Per prompt token, the KV heads that kept it, summed over layers."
    )
    layer_kept_counts: list[str] = Field(
        description="Per layer, base64 of one byte per prompt token: the KV heads that kept it."
    )


def usage_of(num_prompt_tokens: int, num_output_tokens: int) -> Usage:
    """Return the counts of a request."""
    return Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_output_tokens,
        total_tokens=num_prompt_tokens + num_output_tokens,
    )


def kv_cache_of(report: CompressionReport | None) -> KVCacheInfo | None:
    """Return what an answer says of its prompt's KV cache; None when it was never compressed."""
    if report is None:
        return None
    return KVCacheInfo(
        method=report.method,
        original_entries=report.original_entries,
        compressed_entries=report.compressed_entries,
        compression_ratio=report.compression_ratio,
        original_bytes=report.original_bytes,
        compressed_bytes=report.compressed_bytes,
        kept_attention_mass=report.kept_attention_mass,
        skipped=report.skipped,
    )


def explanation_of(report: CompressionReport | None) -> Explanation | None:
    """Return which prompt tokens were kept; None where the request did not ask."""
    if report is None or report.kept_counts is None:
        return None
    counts = report.kept_counts
    return Explanation(
        num_kv_heads=counts.num_kv_heads,
        kept_counts=list(counts.total),
        layer_kept_counts=[base64.b64encode(row).decode("ascii") for row in counts.per_layer],
    )
