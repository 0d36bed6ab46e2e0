"""Turns a caller's values into a core request, follows its events and records what came of it.

It knows no HTTP: callers map its errors and results to whatever they speak.
"""

import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, datetime
from typing import Final

import structlog

from app.records import GenerationRecord, RecordSink
from app.services.answers import GenerationResult, whole_choices
from app.services.inputs import GenerationInput, to_request
from app.services.ports import GenerationEngine, GenerationStream
from app.services.rate_limits import Grant, Quotas
from snapkv_core import (
    CompressionConfig,
    DeadlineExceededError,
    EngineStoppedError,
    FinishReason,
    GenerationFailedError,
    GenerationRequest,
    InvalidParameterError,
    RequestSummary,
    SnapKVError,
    SnapshotUse,
    TokenEvent,
    ToolSyntax,
)

#: Longest piece of an engine's error text that goes into a log line.
MAX_LOGGED_ERROR_CHARS: Final = 500

#: How a choice ends whose request gets an error instead of an answer.
_FAILURES: Final = (FinishReason.ERROR, FinishReason.ABORT, FinishReason.DEADLINE)

#: Name under which a traced request's context holds its trace.
TRACE_ID: Final = "trace_id"

_log = structlog.get_logger("snapkv.requests")


class Generation:
    """A submitted request; iterate over its events, and close it whatever happens.

    Used by one task. Closing records the request exactly once and aborts it if it is unfinished.
    """

    def __init__(
        self,
        request: GenerationRequest,
        model: str,
        stream: GenerationStream,
        *,
        started_at: datetime,
        submitted_s: float,
        grant: Grant,
        is_engine_alive: Callable[[], bool],
        on_closed: Callable[[GenerationRecord], None],
    ) -> None:
        """Follow a request that was handed to the engine.

        Args:
            request: The request.
            model: Name of the model.
            stream: Its answer.
            started_at: When it was about to be handed over.
            submitted_s: The same by the monotonic clock, seconds.
            grant: What it was charged.
            is_engine_alive: Says whether the engine's failure is the request's own.
            on_closed: Called once at the end.
        """
        self._request = request
        self.request_id = request.request_id
        self.model = model
        self.num_choices = request.sampling.n
        self.finish_reasons: dict[int, FinishReason] = {}
        self.summary: RequestSummary | None = None
        self._stream = stream
        self._started_at = started_at
        self._submitted_s = submitted_s
        self._trace_id: str | None = structlog.contextvars.get_contextvars().get(TRACE_ID)
        self._first_token_s: float | None = None
        self.num_prompt_tokens = stream.num_prompt_tokens
        self.snapshot: SnapshotUse = stream.snapshot
        self.lookup_ms = stream.lookup_ms
        self.num_output_tokens = 0
        self._grant = grant
        self._is_engine_alive = is_engine_alive
        self._on_closed = on_closed
        self._is_closed = False

    @property
    def snapshots(self) -> tuple[SnapshotUse, ...]:
        """What a snapshot did for its prompt."""
        return (self.snapshot,)

    async def events(self) -> AsyncIterator[TokenEvent]:
        """Yield the events up to the one that carries the summary.

        Raises:
            GenerationFailedError: The engine failed in the middle of the answer.
            EngineStoppedError: The engine stopped before the answer was complete.
            DeadlineExceededError: The request's time was up before that.
        """
        async for event in self._stream:
            if self._first_token_s is None and event.token_ids:
                self._first_token_s = time.monotonic()
            self.num_output_tokens += len(event.token_ids)
            if event.finish_reason is not None:
                self.finish_reasons[event.choice_index] = event.finish_reason
            self.summary = event.summary or self.summary
            if event.finish_reason in _FAILURES:
                await self._read_summary(event)
                raise self._failure(event)
            yield event
            if self.summary is not None:
                return
        self.finish_reasons[0] = FinishReason.ERROR
        raise GenerationFailedError("the answer ended without its summary")

    async def aclose(self) -> None:
        """Abort the request if it is unfinished, and record it; may be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            await self._stream.aclose()
        finally:
            record = self.record()
            self._grant.settle(record.num_prompt_tokens + record.num_output_tokens)
            self._on_closed(record)

    async def _read_summary(self, event: TokenEvent) -> None:
        """Read on to the summary where all choices end at once, as they do when time is up."""
        if event.summary is None and event.finish_reason is FinishReason.DEADLINE:
            async for later in self._stream:
                self.summary = later.summary
                if later.finish_reason is not FinishReason.DEADLINE or self.summary is not None:
                    return

    def _failure(self, event: TokenEvent) -> SnapKVError:
        if event.finish_reason is FinishReason.DEADLINE:
            return DeadlineExceededError("the request's time was up before its answer was complete")
        if event.finish_reason is FinishReason.ABORT or not self._is_engine_alive():
            return EngineStoppedError("the server stopped before the answer was complete")
        if event.error_field is not None:
            return InvalidParameterError(event.error_field, event.error or "cannot be met")
        _log.error(
            "generation_failed",
            request_id=self.request_id,
            error=(event.error or "")[:MAX_LOGGED_ERROR_CHARS],
        )
        return GenerationFailedError("the model failed while generating this answer")

    def _finish_reason(self) -> FinishReason:
        for failure in (FinishReason.ERROR, FinishReason.DEADLINE):
            if failure in self.finish_reasons.values():
                return failure
        return FinishReason.ABORT if self.summary is None else self.summary.finish_reasons[0]

    def record(self) -> GenerationRecord:
        """Return what is known of the request now that it has ended."""
        summary = self.summary
        # A request that was aborted has no summary, and that of one which the engine could not end
        # knows no tokens: then what was seen from here stands in.
        num_output_tokens = self.num_output_tokens
        duration_ms = _ms(time.monotonic() - self._submitted_s)
        first_s, first_ms = self._first_token_s, None
        if first_s is not None:
            first_ms = _ms(first_s - self._submitted_s)
        timings = None if summary is None else summary.timings
        if summary is not None:
            duration_ms = summary.timings.total_ms
            if self.num_output_tokens > summary.num_output_tokens:
                timings = None  # made up for a request that the engine could not end
            if summary.num_output_tokens > 0:
                num_output_tokens = summary.num_output_tokens
                first_ms = summary.timings.time_to_first_token_ms
        return GenerationRecord(
            request_id=self.request_id,
            trace_id=self._trace_id,
            model=self.model,
            started_at=self._started_at,
            num_choices=self.num_choices,
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=num_output_tokens,
            finish_reason=self._finish_reason(),
            knobs=self._request.compression,
            compression=None if summary is None else summary.compression,
            timings=timings,
            snapshot=self.snapshot,
            lookup_ms=self.lookup_ms,
            duration_ms=duration_ms,
            time_to_first_token_ms=first_ms,
        )


class GenerationService:
    """Opens generations on the engine; used on the event loop only."""

    def __init__(
        self,
        engine: Callable[[], GenerationEngine],
        default_compression: CompressionConfig,
        sinks: Sequence[RecordSink],
        quotas: Quotas,
    ) -> None:
        """Serve from whatever `engine` returns, which may raise while there is none.

        Args:
            engine: Returns the engine.
            default_compression: What requests that name nothing get, until it is replaced.
            sinks: Told of each request that ended.
            quotas: What callers may have.
        """
        self._engine = engine
        self._sinks = tuple(sinks)
        self._quotas = quotas
        self._default_compression = default_compression
        self._active_ids: set[str] = set()

    @property
    def num_in_flight(self) -> int:
        """Requests that were opened and not closed yet."""
        return len(self._active_ids)

    @property
    def model_name(self) -> str:
        """Name of the served model.

        Raises:
            EngineNotReadyError: There is no engine yet, or it takes no new requests.
            EngineStoppedError: It was stopped.
        """
        return self._engine().model_name

    @property
    def max_in_flight(self) -> int:
        """Requests that the engine takes at once; raises what `model_name` raises."""
        config = self._engine().config
        return config.max_num_seqs + config.max_num_waiting

    @property
    def tool_syntax(self) -> ToolSyntax | None:
        """How the model writes calls of tools; raises what `model_name` raises."""
        return self._engine().tool_syntax

    @property
    def default_compression(self) -> CompressionConfig:
        """How prompts of requests that name nothing are compressed."""
        return self._default_compression

    def use_default_compression(self, default_compression: CompressionConfig) -> None:
        """Replace what requests that name nothing get, from the next one on."""
        self._default_compression = default_compression

    async def open(self, request_id: str, given: GenerationInput) -> Generation:
        """Submit a request.

        Args:
            request_id: Name of the request in the answer and in logs.
            given: What the caller asked for.

        Returns:
            The running request, to be closed by the caller.

        Raises:
            InvalidParameterError: A value is not acceptable; nothing was queued.
            QueueFullError: No room to wait; nothing was queued.
            EngineStoppedError: The engine takes no work.
            EngineNotReadyError: There is no engine yet.
            OverCeilingError: The caller may never ask for as much.
            RateLimitedError: The caller has had what it may have in a minute.
        """
        engine = self._engine()
        limits = self._quotas.limits_of(given.caller)
        request = to_request(self._unused(request_id), given, self._default_compression, limits)
        grant = self._quotas.grant(given.caller, request)
        started_at, submitted_s = datetime.now(UTC), time.monotonic()
        self._active_ids.add(request.request_id)
        try:
            stream = await engine.submit(request, grant.admit)
        except BaseException:
            grant.cancel()
            self._active_ids.discard(request.request_id)
            raise
        return Generation(
            request,
            engine.model_name,
            stream,
            started_at=started_at,
            submitted_s=submitted_s,
            grant=grant,
            is_engine_alive=lambda: engine.stats().is_alive,
            on_closed=self._on_closed,
        )

    async def complete(self, request_id: str, given: GenerationInput) -> GenerationResult:
        """Submit a request and wait for its whole answer; a cancelled call aborts it.

        Raises:
            GenerationFailedError: The engine failed in the middle of the answer.
            DeadlineExceededError: The request's time was up before the answer was complete.
            SnapKVError: Any error of `open`.
        """
        generation = await self.open(request_id, given)
        try:
            choices = await whole_choices(generation.events(), generation.num_choices)
        finally:
            await generation.aclose()
        assert generation.summary is not None, "events() ends with a summary or an error"
        return GenerationResult(
            generation.request_id, generation.model, choices, (generation.summary,)
        )

    def _on_closed(self, record: GenerationRecord) -> None:
        self._active_ids.discard(record.request_id)
        for sink in self._sinks:
            try:
                sink.on_generation(record)
            except Exception:  # whoever takes notes must not cost the caller its answer
                _log.exception("record_sink_failed", sink=type(sink).__name__)

    def _unused(self, request_id: str) -> str:
        # Callers choose request ids, so two running requests may bring the same one; the engine
        # must not take one for the other.
        if request_id not in self._active_ids:
            return request_id
        return f"{request_id[:100]}-{uuid.uuid4().hex[:12]}"


def _ms(seconds: float) -> float:
    return round(seconds * 1_000, 3)
