"""Frozen configuration of the engine and of one prompt's compression, checked when built."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, Literal, get_args

from snapkv_core.errors import InvalidParameterError
from snapkv_core.validation import require_choice, require_int, require_number

CompressionMethod = Literal["full", "snapkv"]
Pooling = Literal["avg", "max"]

COMPRESSION_METHODS: Final[tuple[str, ...]] = get_args(CompressionMethod)
POOLINGS: Final[tuple[str, ...]] = get_args(Pooling)

#: A capacity above any context is legal and means "keep everything"; beyond this it is a typo.
MAX_CAPACITY_PROMPT: Final = 1_048_576
#: The window's queries are scored against the whole prompt, so their number is a memory cost.
MAX_WINDOW_SIZE: Final = 1_024
#: Far above any published setting (the widest is 63); a wider pool only blurs the vote.
MAX_KERNEL_SIZE: Final = 1_023
#: Decode attention runs over tiles of this many tokens, which a page must divide.
MAX_PAGE_SIZE: Final = 64


@dataclass(frozen=True, slots=True)
class CompressionConfig:
    """How the KV cache of one prompt is compressed.

    Attributes:
        method: `full` keeps everything, `snapkv` keeps what the observation window attends to.
        max_capacity_prompt: Prompt tokens kept per KV head and layer, the window counted in.
        window_size: Last prompt tokens, whose queries score the rest; always kept.
        kernel_size: Width in tokens of the pooling over scores; odd, 1 turns pooling off.
        pooling: `avg` or `max`.

    Raises:
        InvalidParameterError: A value is out of its range; names the field.
    """

    method: CompressionMethod = "snapkv"
    max_capacity_prompt: int = 4096
    window_size: int = 32
    kernel_size: int = 3
    pooling: Pooling = "avg"

    def __post_init__(self) -> None:
        require_choice("method", self.method, COMPRESSION_METHODS)
        require_choice("pooling", self.pooling, POOLINGS)
        require_int("window_size", self.window_size, 1, MAX_WINDOW_SIZE)
        require_int("kernel_size", self.kernel_size, 1, MAX_KERNEL_SIZE)
        require_int("max_capacity_prompt", self.max_capacity_prompt, 2, MAX_CAPACITY_PROMPT)
        if self.kernel_size % 2 == 0:
            raise InvalidParameterError(
                "kernel_size", f"must be odd so that pooling is centred, got {self.kernel_size}"
            )
        if self.max_capacity_prompt <= self.window_size:
            raise InvalidParameterError(
                "max_capacity_prompt",
                f"must be greater than window_size ({self.window_size}), "
                f"got {self.max_capacity_prompt}",
            )

    def num_kept(self, num_prompt_tokens: int) -> int:
        """Return the tokens of a prompt that each layer and KV head keeps, in the mean."""
        is_smaller = self.compresses(num_prompt_tokens)
        return self.max_capacity_prompt if is_smaller else num_prompt_tokens

    def compresses(self, num_prompt_tokens: int) -> bool:
        """Tell whether a prompt of this length loses tokens under this configuration."""
        return self.method != "full" and num_prompt_tokens > self.max_capacity_prompt


#: Named sets of knobs. Summaries need breadth (GovReport falls 12 % at 2,048 and 6 % at 4,096 in
#: the paper's table), questions need little, code and retrieved passages lie in between.
PROFILES: Final[Mapping[str, CompressionConfig]] = MappingProxyType(
    {
        "qa": CompressionConfig(
            max_capacity_prompt=2048, window_size=32, kernel_size=7, pooling="max"
        ),
        "summarize": CompressionConfig(
            max_capacity_prompt=4096, window_size=32, kernel_size=7, pooling="max"
        ),
        "rag": CompressionConfig(
            max_capacity_prompt=2048, window_size=64, kernel_size=15, pooling="max"
        ),
        "code": CompressionConfig(
            max_capacity_prompt=3072, window_size=64, kernel_size=7, pooling="max"
        ),
    }
)


def resolve_compression(
    default: CompressionConfig, profile: str | None, overrides: Mapping[str, object]
) -> CompressionConfig:
    """Combine a default, a profile and explicit knobs; later ones win.

    Args:
        default: What applies when the caller names nothing.
        profile: Key of `PROFILES`, or None.
        overrides: Explicit values by field name of `CompressionConfig`; None counts as absent.

    Returns:
        The configuration to run with.

    Raises:
        InvalidParameterError: Unknown profile, or a combination that is out of range.
    """
    base = default
    if profile is not None:
        require_choice("profile", profile, tuple(PROFILES))
        base = PROFILES[profile]
    given = {name: value for name, value in overrides.items() if value is not None}
    return replace(base, **given)  # type: ignore[arg-type]  # checked by __post_init__


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the engine loads and how much it runs at once.

    Attributes:
        model: `demo`, a local folder, or a hub id such as `mistralai/Mistral-7B-Instruct-v0.2`.
        revision: Hub revision; None means the default branch.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        dtype: `auto`, `float32`, `bfloat16` or `float16`. Auto is bfloat16 on a GPU and on a
            CPU whichever of float32 and bfloat16 multiplies faster when measured at load.
        cache_dir: Folder for the converted demo model.
        served_model_name: Name in answers; None derives it from `model`.
        max_model_len: Tokens that prompt and answer may have together; None takes the model's.
        max_num_seqs: Sequences held in memory at once.
        max_num_waiting: Requests that may queue beyond those.
        attention_backend: `auto`, `sdpa`, `matmul` or `flash`.
        page_size: Tokens in a page of the KV cache, a power of two up to 64; None takes what was
            measured to be good for the device.
        kv_cache_bytes: Bytes of the KV cache's pool; None takes a share of free memory at start.
        kv_memory_fraction: That share, of memory that is free once the model is loaded; None takes
            0.9 on a GPU and 0.4 on a CPU.
        prefill_chunk_tokens: Most prompt tokens that go through a layer in one prefill slice,
            rounded down to the attention backend's grid (512 for sdpa, else 256) but at least one
            cell of it.
        decode_gap_target_ms: Prefill slices are cut so that running sequences get their next
            token within this time; None takes 50 on a GPU and 250 on a CPU.
        overtake_max_tokens: A prompt of at most this many tokens may be read before a longer one
            that is being read; 0 keeps strict order.
        request_timeout_s: Time from submission after which any request is ended.
        default_max_new_tokens: Answer length of a request that names none.
        max_new_tokens_limit: Longest answer a request may ask for.
        num_threads: CPU threads for the model; None leaves PyTorch's choice.

    Raises:
        InvalidParameterError: A value is out of its range; names the field.
    """

    model: str = "demo"
    revision: str | None = None
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    cache_dir: str = "~/.cache/snapkv"
    served_model_name: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 8
    max_num_waiting: int = 64
    attention_backend: Literal["auto", "sdpa", "matmul", "flash"] = "auto"
    page_size: int | None = None
    kv_cache_bytes: int | None = None
    kv_memory_fraction: float | None = None
    prefill_chunk_tokens: int = 1024
    decode_gap_target_ms: int | None = None
    overtake_max_tokens: int = 1024
    request_timeout_s: float = 600.0
    default_max_new_tokens: int = 256
    max_new_tokens_limit: int = 4096
    num_threads: int | None = None

    def __post_init__(self) -> None:
        if not self.model.strip():
            raise InvalidParameterError("model", "must name a model, got an empty string")
        require_choice("dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        require_choice(
            "attention_backend", self.attention_backend, ("auto", "sdpa", "matmul", "flash")
        )
        for field, low, high in (
            ("max_num_seqs", 1, 1_024),
            ("max_num_waiting", 1, 100_000),
            ("prefill_chunk_tokens", 16, 65_536),
            ("max_new_tokens_limit", 1, 1_048_576),
            ("default_max_new_tokens", 1, self.max_new_tokens_limit),
            ("overtake_max_tokens", 0, 1_048_576),
        ):
            require_int(field, getattr(self, field), low, high)
        for field, low, high in (
            ("max_model_len", 2, 16_777_216),
            ("num_threads", 1, 4_096),
            ("page_size", 1, MAX_PAGE_SIZE),
            ("kv_cache_bytes", 1, 1 << 50),
            ("decode_gap_target_ms", 1, 600_000),
        ):
            if getattr(self, field) is not None:
                require_int(field, getattr(self, field), low, high)
        if self.page_size is not None and self.page_size.bit_count() != 1:
            raise InvalidParameterError(
                "page_size", f"must be a power of two, got {self.page_size}"
            )
        if self.kv_memory_fraction is not None:
            require_number("kv_memory_fraction", self.kv_memory_fraction, low=0.01, high=1.0)
        require_number("request_timeout_s", self.request_timeout_s, low=0.001, high=86_400.0)
