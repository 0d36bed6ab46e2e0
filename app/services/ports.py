"""What the services need of an engine, so that a fake one fits as well as the real one."""

from collections.abc import Callable, Sequence
from typing import Protocol

from snapkv_core import (
    CompressionConfig,
    EngineConfig,
    EngineStats,
    GenerationRequest,
    KVStore,
    RequestSize,
    SnapshotObserver,
    SnapshotPolicy,
    SnapshotUse,
    TokenEvent,
    TokenizedText,
    TokenizeRequest,
    ToolSyntax,
)


class GenerationStream(Protocol):
    """The events of one request, in the order in which they were generated."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt as the model counts them."""

    @property
    def snapshot(self) -> SnapshotUse:
        """What a snapshot did for it."""

    @property
    def lookup_ms(self) -> float:
        """Milliseconds that looking for one took."""

    def __aiter__(self) -> "GenerationStream":
        """Return itself."""

    async def __anext__(self) -> TokenEvent:
        """Return the next event; the request's last one carries its summary."""

    async def aclose(self) -> None:
        """Abort the request if it is unfinished; may be called again."""


class TextCoder(Protocol):
    """Turns texts into tokens and back, off the event loop."""

    async def tokenize(self, request: TokenizeRequest) -> TokenizedText:
        """Return the tokens of a text, or raise one of the core's errors."""

    async def detokenize(self, token_ids: Sequence[int], timeout_s: float | None = None) -> str:
        """Return the text of tokens, or raise one of the core's errors."""


class GenerationEngine(Protocol):
    """An engine that is loaded; `AsyncEngine` is one."""

    @property
    def config(self) -> EngineConfig:
        """What it was loaded with."""

    @property
    def model_name(self) -> str:
        """Name of the model in answers."""

    @property
    def max_model_len(self) -> int:
        """Tokens that prompt and answer may have together."""

    @property
    def texts(self) -> TextCoder:
        """Its tokenizer."""

    @property
    def device(self) -> str:
        """Where the model runs."""

    @property
    def dtype(self) -> str:
        """Number format of the weights."""

    @property
    def attention_backend(self) -> str:
        """Name of what computes decode attention."""

    @property
    def page_size(self) -> int:
        """Tokens in a page of the KV cache."""

    @property
    def num_cache_tokens(self) -> int:
        """Tokens that the KV cache's pool holds, each with all its layers and KV heads."""

    @property
    def tool_syntax(self) -> ToolSyntax | None:
        """How the model writes calls of tools; None where its chat template does not tell."""

    def max_concurrent(self, compression: CompressionConfig, max_new_tokens: int) -> int:
        """Return how many sequences fit at once, each with its kept prompt and its answer."""

    def use_snapshots(
        self,
        store: KVStore,
        fingerprint: str,
        policy: SnapshotPolicy,
        observer: SnapshotObserver,
    ) -> None:
        """Look prompts up in a store, which it closes at its end; before it is started."""

    def start(self) -> None:
        """Start taking work."""

    def stop(self) -> None:
        """Take no more work, abort what runs and wait for the end; blocking."""

    async def submit(
        self, request: GenerationRequest, admit: Callable[[RequestSize], None] | None = None
    ) -> GenerationStream:
        """Queue a request, or raise one of the core's errors or what `admit` raises."""

    def stats(self) -> EngineStats:
        """Return the engine's numbers of this moment."""
