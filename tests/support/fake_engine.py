"""An engine without a model: it echoes the prompt's words, and fails or stalls when told to."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from snapkv_core import (
    ChatMessage,
    CompressionConfig,
    EngineConfig,
    EngineObserver,
    EngineStats,
    EngineStoppedError,
    FinishReason,
    GenerationRequest,
    InvalidParameterError,
    KVStore,
    PromptTooLongError,
    QueueFullError,
    RequestSize,
    RequestTooLargeError,
    SnapshotObserver,
    SnapshotPolicy,
    SnapshotUse,
    StepStats,
    TokenEvent,
    ToolSyntax,
)
from tests.support.fake_answers import (
    BYTES_PER_ENTRY,
    NUM_KV_HEADS,
    NUM_LAYERS,
    events_of,
    report_of,
    summary_of,
    words_of,
)
from tests.support.fake_texts import FakeTexts

NUM_PAGES = 400
PAGE_SIZE = 16
PAGE_BYTES = PAGE_SIZE * BYTES_PER_ENTRY // (NUM_LAYERS * NUM_KV_HEADS)
UNKNOWN_ROLE = "wizard"


@dataclass
class FakeBehaviour:
    """What the fake does next; tests change it while it runs.

    Attributes:
        queue_full: Refuse requests as if too many waited.
        crash_on_submit: Raise an exception that is none of the core's.
        fail_after: Fail after this many events; None never fails.
        abort_after: End with `abort` after this many events, as an engine that is stopped.
        stall_after: Wait after this many events, until the engine is stopped.
        delay_s: Pause before each event.
        hold: Wait before each event while this says so.
        submit_s: Pause before a request is taken, as while another one reads the same prompt.
        snapshot: What a snapshot did for each request.
    """

    queue_full: bool = False
    crash_on_submit: bool = False
    fail_after: int | None = None
    abort_after: int | None = None
    stall_after: int | None = None
    delay_s: float = 0.0
    hold: Callable[[], bool] = lambda: False
    submit_s: float = 0.0
    snapshot: SnapshotUse = "off"


@dataclass
class FakeEngine:
    """Fits wherever an `AsyncEngine` does; a word is a token."""

    config: EngineConfig = field(default_factory=EngineConfig)
    observer: EngineObserver | None = None
    model_name: str = "fake"
    max_model_len: int = 2_048
    device: str = "cpu"
    dtype: str = "float32"
    attention_backend: str = "echo"
    page_size: int = PAGE_SIZE
    tool_syntax: ToolSyntax | None = "tags"
    num_cache_tokens: int = NUM_PAGES * PAGE_SIZE // (NUM_LAYERS * NUM_KV_HEADS)
    behaviour: FakeBehaviour = field(default_factory=FakeBehaviour)
    requests: list[GenerationRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    num_running: int = 0
    last_step_age_s: float = 0.0
    is_alive: bool = False
    store: KVStore | None = None
    fingerprint: str = ""
    snapshot_observer: SnapshotObserver | None = None

    def take_over(self, config: EngineConfig, observer: EngineObserver) -> "FakeEngine":
        """Stand in for loading: become the engine of an app, which observes it."""
        self.config, self.observer = config, observer
        return self

    def use_snapshots(
        self,
        store: KVStore,
        fingerprint: str,
        policy: SnapshotPolicy,
        observer: SnapshotObserver,
    ) -> None:
        """Remember the store; from now on each request tells of a lookup and a write."""
        del policy
        self.store, self.fingerprint, self.snapshot_observer = store, fingerprint, observer

    def start(self) -> None:
        """Start taking work."""
        self.is_alive = True

    def stop(self) -> None:
        """Take no more work."""
        self.is_alive = False
        if self.store is not None:
            self.store.close()

    def max_concurrent(self, compression: CompressionConfig, max_new_tokens: int) -> int:
        """Return how many sequences the pool holds."""
        return self.num_cache_tokens // (compression.max_capacity_prompt + max_new_tokens)

    @property
    def texts(self) -> FakeTexts:
        """Its tokenizer, which splits at blanks."""
        return FakeTexts(self.behaviour.submit_s, self.behaviour.queue_full)

    def stats(self) -> EngineStats:
        """Return numbers of this moment: a running sequence uses one page and reserves two."""
        return EngineStats(
            num_waiting=0,
            num_running=self.num_running,
            kv_bytes=self.num_running * PAGE_BYTES,
            num_pages_used=self.num_running,
            num_pages_reserved=2 * self.num_running,
            num_pages_total=NUM_PAGES,
            page_bytes=PAGE_BYTES,
            workspace_bytes=32 * self.num_running,
            device_memory_bytes=1_000_000,
            last_step_age_s=self.last_step_age_s,
            is_alive=self.is_alive,
        )

    async def submit(
        self, request: GenerationRequest, admit: Callable[[RequestSize], None] | None = None
    ) -> "FakeStream":
        """Take a request or refuse it, as the real engine would."""
        await asyncio.sleep(self.behaviour.submit_s)
        if not self.is_alive:
            raise EngineStoppedError("the engine is stopped")
        if self.behaviour.crash_on_submit:
            raise RuntimeError(f"cannot handle {request.prompt!r}")
        if self.behaviour.queue_full:
            raise QueueFullError(num_waiting=64, retry_after_s=2.5)
        prompt = request.prompt
        if not isinstance(prompt, str) and prompt:
            first = prompt[0]
            if isinstance(first, ChatMessage) and first.role == UNKNOWN_ROLE:
                raise InvalidParameterError("messages", "the chat template knows no such role")
        words = words_of(prompt)
        max_new_tokens = self._max_new_tokens(request, words)
        if admit is not None:
            admit(RequestSize(len(words), max_new_tokens, request.sampling.n))
        self.requests.append(request)
        if self.snapshot_observer is not None:
            self.snapshot_observer.on_lookup("miss", 0.002, 0)
            self.snapshot_observer.on_write("stored", 0.02, 1_000)
        self.num_running += 1
        return FakeStream(self, request, words, max_new_tokens)

    def _max_new_tokens(self, request: GenerationRequest, words: Sequence[str]) -> int:
        """Return the length of the longest answer; raises for a request that cannot fit."""
        default = self.config.default_max_new_tokens
        default = min(default, request.max_default_new_tokens or default)
        max_new_tokens = request.sampling.max_new_tokens or default
        if max_new_tokens > (limit := self.config.max_new_tokens_limit):
            raise InvalidParameterError("max_new_tokens", f"must be at most {limit}")
        if len(words) + max_new_tokens > self.max_model_len:
            raise PromptTooLongError(
                "prompt" if isinstance(request.prompt, str) else "messages",
                num_prompt_tokens=len(words),
                max_new_tokens=max_new_tokens,
                max_model_len=self.max_model_len,
            )
        needed = max_new_tokens * request.sampling.n * BYTES_PER_ENTRY
        if needed > (available := NUM_PAGES * PAGE_BYTES):
            raise RequestTooLargeError(
                "max_new_tokens", needed_bytes=needed, available_bytes=available
            )
        return max_new_tokens


class FakeStream:
    """The echo of one prompt: `n` choices whose events take turns."""

    def __init__(
        self,
        engine: FakeEngine,
        request: GenerationRequest,
        words: Sequence[str],
        max_new_tokens: int,
    ) -> None:
        self.num_prompt_tokens = len(words)
        self.snapshot = engine.behaviour.snapshot
        self.lookup_ms = 0.0 if self.snapshot == "off" else 0.25
        self._engine = engine
        self._request = request
        self._is_over = False
        self._num_events = 0
        limit_s = engine.config.request_timeout_s
        self._deadline_s = asyncio.get_running_loop().time() + min(
            limit_s, limit_s if request.timeout_s is None else request.timeout_s
        )
        report = report_of(request, len(words))
        self._events = events_of(request, words, max_new_tokens, report, self.snapshot)
        if engine.observer is not None:
            engine.observer.on_prompt_compressed(request.request_id, report)

    def __aiter__(self) -> "FakeStream":
        return self

    async def __anext__(self) -> TokenEvent:
        if self._is_over:
            raise StopAsyncIteration
        try:
            async with asyncio.timeout_at(self._deadline_s):
                await self._wait()
        except TimeoutError:
            return self._finish(self._broken(FinishReason.DEADLINE))
        behaviour = self._engine.behaviour
        if not self._engine.is_alive or self._num_events == behaviour.fail_after:
            return self._finish(self._broken(FinishReason.ERROR))
        if self._num_events == behaviour.abort_after:
            return self._finish(self._broken(FinishReason.ABORT))
        event = self._events[self._num_events]
        self._num_events += 1
        if self._engine.observer is not None:  # one token a step
            self._engine.observer.on_step(StepStats(0.02, 0.0, 0.02, 0.0, 1))
        return self._finish(event) if event.summary is not None else event

    async def aclose(self) -> None:
        """Abort the request if it is unfinished."""
        if not self._is_over:
            self._is_over = True
            self._engine.num_running -= 1
            self._engine.aborted.append(self._request.request_id)

    async def _wait(self) -> None:
        behaviour = self._engine.behaviour
        await asyncio.sleep(behaviour.delay_s)
        while behaviour.hold():  # noqa: ASYNC110  # a test decides, which wakes no task
            await asyncio.sleep(0.001)
        if self._num_events == behaviour.stall_after:
            while self._engine.is_alive:  # noqa: ASYNC110  # it is stopped on another thread
                await asyncio.sleep(0.005)

    def _broken(self, reason: FinishReason) -> TokenEvent:
        summary = summary_of(
            self._request, self.num_prompt_tokens, (reason,), self._num_events, None, self.snapshot
        )
        return TokenEvent(
            self._request.request_id,
            0,
            "",
            finish_reason=reason,
            summary=summary,
            error=None if reason is FinishReason.ABORT else "the fake was told to fail",
        )

    def _finish(self, event: TokenEvent) -> TokenEvent:
        self._is_over = True
        self._engine.num_running -= 1
        if self._engine.observer is not None and event.summary is not None:
            self._engine.observer.on_request_finished(event.summary)
        return event


def load_fake_engine(config: EngineConfig, observer: EngineObserver) -> FakeEngine:
    """Load a fake as `create_app` loads the real engine."""
    return FakeEngine(config=config, observer=observer)
