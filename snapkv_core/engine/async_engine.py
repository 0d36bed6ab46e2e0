"""The asyncio front of the engine: one thread owns the device, streams carry the events."""

import asyncio
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from snapkv_core.config import CompressionConfig, EngineConfig
from snapkv_core.engine.admission import size_of
from snapkv_core.engine.engine import Engine
from snapkv_core.engine.finding import NOT_LOOKED_UP, Finding
from snapkv_core.engine.inbox import Abort, Add, Counts, Stop
from snapkv_core.engine.memory_plan import held_memory_bytes
from snapkv_core.engine.response_stream import ResponseStream
from snapkv_core.engine.service_rate import ServiceRate
from snapkv_core.engine.snapshot_cache import SnapshotCache, SnapshotObserver, SnapshotPolicy
from snapkv_core.engine.snapshot_model import snapshot_model
from snapkv_core.engine.text_coder import TextCoder
from snapkv_core.engine.waiting_room import WaitingRoom
from snapkv_core.errors import (
    DeadlineExceededError,
    EngineStoppedError,
    SnapKVError,
)
from snapkv_core.events import (
    EngineObserver,
    EngineStats,
    GenerationRequest,
    RequestSize,
    TokenEvent,
)
from snapkv_core.kv_cache.snapshot import SnapshotIdentity
from snapkv_core.kv_cache.store import KVStore
from snapkv_core.models.tool_syntax import ToolSyntax
from snapkv_core.sequence import FinishReason, Sequence

_logger = logging.getLogger(__name__)
#: Each may hold tens of megabytes for a long prompt.
_MAX_TOKENISERS: Final = 4
_STOPPED: Final = "the engine was stopped before this request was finished"


class AsyncEngine:
    """An `Engine` on a thread of its own.

    The event loop and the thread share nothing but the inbox and the counters of `stats`; each
    step's events reach the loop in one `call_soon_threadsafe`.
    """

    def __init__(self, engine: Engine, snapshots: SnapshotCache | None = None) -> None:
        """Run `engine`; prompts are looked up in `snapshots` first, which `stop` closes."""
        self._engine = engine
        self._snapshots = snapshots
        self._inbox: queue.SimpleQueue[Add | Abort | Stop] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="snapkv-engine", daemon=True)
        self._takes_requests = False
        self._inbox_lock = threading.Lock()  # no request enters an inbox that was drained for good
        self._tokenisers = ThreadPoolExecutor(
            min(_MAX_TOKENISERS, os.cpu_count() or 1), thread_name_prefix="snapkv-tokeniser"
        )
        config = engine.config
        self._room = WaitingRoom(config.max_num_seqs + config.max_num_waiting)
        self._texts = TextCoder(engine.tokenizer, engine.spec, config, self._tokenisers)
        self._streams: dict[str, ResponseStream] = {}  # engine thread only
        self._service_rate = ServiceRate()
        self._busy_since: float | None = None
        self._counts = Counts()

    @classmethod
    def load(cls, config: EngineConfig, observer: EngineObserver | None = None) -> "AsyncEngine":
        """Load a model and warm it up; blocks for seconds to minutes.

        Raises:
            ModelLoadError: The model cannot be served.
        """
        return cls(Engine.load(config, observer))

    @property
    def config(self) -> EngineConfig:
        """What the engine was built from."""
        return self._engine.config

    @property
    def model_name(self) -> str:
        """Name that the model is served under."""
        return self._engine.spec.name

    @property
    def max_model_len(self) -> int:
        """Tokens that prompt and answer may have together."""
        return self._engine.spec.max_model_len

    @property
    def texts(self) -> TextCoder:
        """Turns texts into tokens and back, on the threads that prepare requests."""
        return self._texts

    @property
    def device(self) -> str:
        """Device the model runs on, as PyTorch spells it."""
        return str(self._engine.device)

    @property
    def dtype(self) -> str:
        """Number format of weights and KV cache."""
        return str(self._engine.dtype).removeprefix("torch.")

    @property
    def attention_backend(self) -> str:
        """How attention is computed: `sdpa`, `matmul` or `flash`."""
        return self._engine.parts.backend.name

    @property
    def page_size(self) -> int:
        """Tokens in a page of the KV cache."""
        return self._engine.parts.layout.page_size

    @property
    def num_cache_tokens(self) -> int:
        """Tokens, in all layers and KV heads, that the KV cache's pool holds."""
        parts = self._engine.parts
        per_row = parts.manager.num_pages_total // parts.layout.num_page_rows
        return per_row * parts.layout.page_size

    @property
    def tool_syntax(self) -> ToolSyntax | None:
        """How the model writes calls of tools; None where its chat template does not tell."""
        return self._engine.tokenizer.tool_syntax

    def max_concurrent(self, compression: CompressionConfig, max_new_tokens: int) -> int:
        """Return how many sequences fit at once whose prompts are longer than their capacity."""
        return self._engine.max_concurrent(compression, max_new_tokens)

    def use_snapshots(
        self,
        store: KVStore,
        fingerprint: str,
        policy: SnapshotPolicy | None = None,
        observer: SnapshotObserver | None = None,
    ) -> None:
        """Look prompts up in a store before they are read, and store them; call before `start`.

        Args:
            store: Keeps snapshots; closed by `stop`.
            fingerprint: Names the weights, as `weights_fingerprint` does.
            policy: When the store is used.
            observer: Told of what the cache does.
        """
        assert self._snapshots is None, "an engine has one cache"
        policy = policy or SnapshotPolicy()
        model = snapshot_model(self._engine, fingerprint, policy.body)
        self._snapshots = SnapshotCache(store, model, policy, observer)

    def start(self) -> None:
        """Start the engine thread; call once."""
        self._takes_requests = True
        self._thread.start()

    def stop(self) -> None:
        """Take no more requests, end those in flight with an error, and join the thread."""
        self._takes_requests = False
        self._tokenisers.shutdown(wait=False)
        if self._thread.is_alive():
            self._inbox.put(Stop())
            self._thread.join()
        if self._snapshots is not None:
            self._snapshots.close()

    async def submit(
        self, request: GenerationRequest, admit: Callable[[RequestSize], None] | None = None
    ) -> ResponseStream:
        """Queue a request; tokenising happens on a worker thread.

        Args:
            request: The request.
            admit: Called with its size once that is known; what it raises refuses the request.

        Raises:
            EngineStoppedError: The engine is not running.
            QueueFullError: Too many requests are in flight.
            DeadlineExceededError: Its time was up before it could be queued.
            InvalidParameterError: A parameter does not fit this model or configuration.
            PromptTooLongError: The prompt does not fit the context.
            RequestTooLargeError: Its KV cache exceeds all memory there is for it.
        """
        self._require_running()
        self._room.require_place(request.tenant, self._service_rate.retry_after_s)
        group, finding = await self._prepare(request, admit)
        stream = ResponseStream(
            group[0], finding, on_abandoned=self._abandon, on_ended=self._room.leave
        )
        with self._inbox_lock:
            try:
                self._require_running()
            except EngineStoppedError:
                finding.give(None)
                raise
            self._inbox.put(Add(request, group, finding, stream))
        self._room.enter(stream, request.tenant)
        return stream

    def stats(self) -> EngineStats:
        """Return the engine's state; any thread may call this."""
        counts = self._counts
        busy_since = self._busy_since
        return EngineStats(
            num_waiting=counts.num_waiting + self._inbox.qsize() + self._room.num_preparing,
            num_running=counts.num_running,
            kv_bytes=counts.num_pages_used * self._engine.parts.layout.page_bytes,
            num_pages_used=counts.num_pages_used,
            num_pages_reserved=counts.num_pages_reserved,
            num_pages_total=self._engine.parts.ledger.num_pages_total,
            page_bytes=self._engine.parts.layout.page_bytes,
            workspace_bytes=counts.workspace_bytes,
            device_memory_bytes=held_memory_bytes(self._engine.device),
            last_step_age_s=0.0 if busy_since is None else time.monotonic() - busy_since,
            is_alive=self._takes_requests and self._thread.is_alive(),
            snapshots=None if self._snapshots is None else self._snapshots.stats(),
        )

    async def _prepare(
        self, request: GenerationRequest, admit: Callable[[RequestSize], None] | None
    ) -> tuple[tuple[Sequence, ...], Finding]:
        """Tokenise on a thread and look for a snapshot, within the request's time."""
        limit_s = min(request.timeout_s or math.inf, self.config.request_timeout_s)
        # Other prompts may keep these threads busy, which counts as waiting.
        try:
            prepared = self._tokenisers.submit(self._identified, request, time.monotonic())
        except RuntimeError as error:  # stopped since `submit` looked
            raise EngineStoppedError("the engine is stopped and takes no requests") from error
        self._room.begin_preparing(request.tenant)
        try:
            async with asyncio.timeout(limit_s):
                group, identity = await asyncio.wrap_future(prepared)
                if admit is not None:
                    admit(size_of(group))
                return group, await self._find(request, group[0], identity)
        except TimeoutError as error:
            raise DeadlineExceededError(
                "the request's time was up before it could be queued"
            ) from error
        finally:
            prepared.cancel()
            # A thread that has begun goes on, whoever has left, and takes its place until then.
            prepared.add_done_callback(lambda _: self._room.end_preparing(request.tenant))

    def _identified(
        self, request: GenerationRequest, arrival_s: float
    ) -> tuple[tuple[Sequence, ...], SnapshotIdentity | None]:
        group = self._engine.prepare(request, arrival_s)
        return group, None if self._snapshots is None else self._snapshots.identify(group[0])

    async def _find(
        self, request: GenerationRequest, leader: Sequence, identity: SnapshotIdentity | None
    ) -> Finding:
        namespace = request.snapshot_namespace
        # A snapshot does not have what the log-probabilities of a prompt are made from.
        if leader.wants_prompt_logprobs:
            return NOT_LOOKED_UP
        if self._snapshots is None or identity is None or namespace is None:
            return NOT_LOOKED_UP
        return await self._snapshots.find(leader, identity, namespace)

    def _require_running(self) -> None:
        if not self._takes_requests:
            raise EngineStoppedError("the engine is stopped and takes no requests")
        if not self._thread.is_alive():
            raise EngineStoppedError("the engine thread has died; the service must be restarted")

    def _abandon(self, stream: ResponseStream) -> None:
        self._room.leave(stream)
        self._inbox.put(Abort(stream))

    def _run(self) -> None:
        """Turn the loop until told to stop; whatever happens, every stream gets an end."""
        reason = "the engine failed; the service must be restarted"
        try:
            while self._drain_inbox():
                self._busy_since = time.monotonic()
                self._service_rate.note_busy(self._busy_since)
                self._deliver(self._engine.step())
                self._count()
            reason = _STOPPED
        except Exception:
            _logger.exception("the engine thread died")
        finally:
            with self._inbox_lock:
                self._takes_requests = False
                self._end_all(reason)
            self._busy_since = None
            self._counts = Counts()

    def _drain_inbox(self) -> bool:
        """Take all messages, waiting for one while there is nothing to do; False means stop."""
        while True:
            if not self._engine.has_work:
                self._busy_since = None
                self._service_rate.note_idle()
            try:
                message = self._inbox.get(block=not self._engine.has_work)
            except queue.Empty:
                return True
            if isinstance(message, Stop):
                return False
            if isinstance(message, Add):
                self._add(message)
            else:
                self._abort(message.stream)
            self._count()

    def _add(self, message: Add) -> None:
        try:
            self._engine.add(message.request, message.group, message.finding)
        except SnapKVError as error:
            message.finding.give(None)
            self._post([(message.stream, message.stream.ending(FinishReason.ERROR, str(error)))])
        else:
            self._streams[message.request.request_id] = message.stream

    def _abort(self, stream: ResponseStream) -> None:
        # Another request may carry the id of one that has ended.
        if self._streams.get(stream.request_id) is stream:
            # Nobody listens any more, so the events of the abort go nowhere.
            self._engine.abort(stream.request_id)
            del self._streams[stream.request_id]
            self._service_rate.note_end(time.monotonic())

    def _deliver(self, events: SequenceOf[TokenEvent]) -> None:
        deliveries = []
        for event in events:
            stream = self._streams[event.request_id]
            deliveries.append((stream, event))
            if event.summary is not None:
                del self._streams[event.request_id]
                self._service_rate.note_end(time.monotonic())
        self._post(deliveries)

    def _post(self, deliveries: SequenceOf[tuple[ResponseStream, TokenEvent]]) -> None:
        """Hand events to their event loops, one call for each loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[ResponseStream, TokenEvent]]] = {}
        for stream, event in deliveries:
            by_loop.setdefault(stream.loop, []).append((stream, event))
        for loop, batch in by_loop.items():
            try:
                loop.call_soon_threadsafe(_put_all, batch)
            except RuntimeError:
                # The loop was closed with requests in flight: nobody is left to read them.
                for stream, _ in batch:
                    self._inbox.put(Abort(stream))

    def _end_all(self, reason: str) -> None:
        """Give every stream its end, those still in the inbox included."""
        try:
            self._deliver(self._engine.end_all(reason))
        except Exception:
            _logger.exception("the engine could not end its requests")
        streams = list(self._streams.values())
        while not self._inbox.empty():
            message = self._inbox.get()
            if isinstance(message, Add):
                streams.append(message.stream)
        for stream in streams:
            stream.finding.give(None)
        self._post([(stream, stream.ending(FinishReason.ERROR, reason)) for stream in streams])
        self._streams.clear()

    def _count(self) -> None:
        parts = self._engine.parts
        self._counts = Counts(
            num_waiting=self._engine.num_waiting,
            num_running=self._engine.num_running,
            num_pages_used=parts.manager.num_pages_used,
            num_pages_reserved=parts.ledger.num_pages_reserved,
            workspace_bytes=parts.ledger.workspace_bytes_reserved,
        )


def _put_all(batch: SequenceOf[tuple[ResponseStream, TokenEvent]]) -> None:
    for stream, event in batch:
        stream.put(event)
