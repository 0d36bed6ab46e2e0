"""SnapKV inference: per-request KV-cache budgets for long prompts.

The public names of the library; everything else may change without notice.
"""

from snapkv_core.compression.standalone import snapkv_select
from snapkv_core.config import (
    COMPRESSION_METHODS,
    MAX_CAPACITY_PROMPT,
    MAX_KERNEL_SIZE,
    MAX_WINDOW_SIZE,
    POOLINGS,
    PROFILES,
    CompressionConfig,
    EngineConfig,
    resolve_compression,
)
from snapkv_core.engine.async_engine import AsyncEngine
from snapkv_core.engine.engine import Engine
from snapkv_core.engine.response_stream import ResponseStream
from snapkv_core.engine.snapshot_cache import LookupOutcome, SnapshotObserver, SnapshotPolicy
from snapkv_core.engine.snapshot_writer import WriteOutcome
from snapkv_core.errors import (
    DeadlineExceededError,
    EngineStoppedError,
    GenerationFailedError,
    InvalidParameterError,
    KVCacheError,
    ModelLoadError,
    PromptTooLongError,
    QueueFullError,
    RequestTooLargeError,
    SnapKVError,
    SnapshotError,
    StoreError,
)
from snapkv_core.events import (
    ChatMessage,
    CompressionReport,
    EngineObserver,
    EngineStats,
    GenerationRequest,
    KeptTokenCounts,
    PositionLogprobs,
    RequestOutput,
    RequestSize,
    RequestSummary,
    RequestTimings,
    SnapshotStats,
    SnapshotUse,
    StepStats,
    TokenEvent,
    TokenizedText,
    TokenizeRequest,
    TokenLogprob,
    ToolCall,
)
from snapkv_core.kv_cache.guarded_store import GuardedStore, StoreHeldBackError
from snapkv_core.kv_cache.snapshot import SNAPSHOT_BODIES, SnapshotBody
from snapkv_core.kv_cache.store import (
    KVStore,
    MemoryStore,
    NullStore,
    check_blob,
    check_key,
    check_namespace,
)
from snapkv_core.kv_cache.tiered_store import OnStoreError, TieredStore
from snapkv_core.models.demo import ensure_demo_model
from snapkv_core.models.fingerprint import weights_fingerprint
from snapkv_core.models.tool_syntax import ToolSyntax
from snapkv_core.sampling_params import (
    MAX_BIASED_TOKENS,
    MAX_CHOICES,
    MAX_SEED,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_TOP_LOGPROBS,
    SamplingParams,
)
from snapkv_core.sequence import FinishReason

__all__ = [
    "COMPRESSION_METHODS",
    "MAX_BIASED_TOKENS",
    "MAX_CAPACITY_PROMPT",
    "MAX_CHOICES",
    "MAX_KERNEL_SIZE",
    "MAX_SEED",
    "MAX_STOP_CHARS",
    "MAX_STOP_STRINGS",
    "MAX_TOP_LOGPROBS",
    "MAX_WINDOW_SIZE",
    "POOLINGS",
    "PROFILES",
    "SNAPSHOT_BODIES",
    "AsyncEngine",
    "ChatMessage",
    "CompressionConfig",
    "CompressionReport",
    "DeadlineExceededError",
    "Engine",
    "EngineConfig",
    "EngineObserver",
    "EngineStats",
    "EngineStoppedError",
    "FinishReason",
    "GenerationFailedError",
    "GenerationRequest",
    "GuardedStore",
    "InvalidParameterError",
    "KVCacheError",
    "KVStore",
    "KeptTokenCounts",
    "LookupOutcome",
    "MemoryStore",
    "ModelLoadError",
    "NullStore",
    "OnStoreError",
    "PositionLogprobs",
    "PromptTooLongError",
    "QueueFullError",
    "RequestOutput",
    "RequestSize",
    "RequestSummary",
    "RequestTimings",
    "RequestTooLargeError",
    "ResponseStream",
    "SamplingParams",
    "SnapKVError",
    "SnapshotBody",
    "SnapshotError",
    "SnapshotObserver",
    "SnapshotPolicy",
    "SnapshotStats",
    "SnapshotUse",
    "StepStats",
    "StoreError",
    "StoreHeldBackError",
    "TieredStore",
    "TokenEvent",
    "TokenLogprob",
    "TokenizeRequest",
    "TokenizedText",
    "ToolCall",
    "ToolSyntax",
    "WriteOutcome",
    "check_blob",
    "check_key",
    "check_namespace",
    "ensure_demo_model",
    "resolve_compression",
    "snapkv_select",
    "weights_fingerprint",
]
