"""Owns the engine's life in this process: loading in the background, serving, stopping."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from typing import Final

import structlog

from app.services.ports import GenerationEngine
from snapkv_core import (
    CompressionConfig,
    EngineStoppedError,
    InvalidParameterError,
    ModelLoadError,
)

RETRY_AFTER_S: Final = 5.0
#: An engine that hangs in a step must not keep the process from ending.
STOP_TIMEOUT_S: Final = 10.0
_POLL_S: Final = 0.02

_log = structlog.get_logger("snapkv.engine")


class EngineState(StrEnum):
    """Where the engine is in its life; it only ever moves down this list."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
    STOPPED = "stopped"


_REASONS: Final = {
    EngineState.LOADING: "the model is still loading; try again later",
    EngineState.DRAINING: "the server is shutting down and takes no new requests",
    EngineState.FAILED: "the model could not be loaded; this server cannot answer",
}


class EngineNotReadyError(Exception):
    """The engine takes no requests: it is loading, draining, or could not be loaded.

    Attributes:
        state: What the engine is doing instead of serving.
        retry_after_s: Seconds after which trying again is sensible.
    """

    def __init__(self, state: EngineState, retry_after_s: float = RETRY_AFTER_S) -> None:
        super().__init__(_REASONS[state])
        self.state = state
        self.retry_after_s = retry_after_s


class EngineHost:
    """Loads an engine off the event loop and hands it out once it is warm.

    Methods run on the event loop, the loader on a thread of its own; `_state` and `_engine` are
    written on the loop only.
    """

    def __init__(
        self,
        load: Callable[[], GenerationEngine],
        *,
        on_ready: Callable[[GenerationEngine], None],
        on_failed: Callable[[str], None],
        default_compression: CompressionConfig,
        stall_timeout_s: float,
    ) -> None:
        """Remember how to load.

        Args:
            load: Blocking; returns an engine that is warm and not started.
            on_ready: Called on the loop when requests can be served.
            on_failed: Called on the loop with one line that says why loading failed.
            default_compression: What requests get that name nothing, to say how many of them fit.
            stall_timeout_s: How long a step may take before the engine counts as stalled.
        """
        self._load = load
        self._on_ready = on_ready
        self._on_failed = on_failed
        self._default_compression = default_compression
        self._stall_timeout_s = stall_timeout_s
        self._state = EngineState.LOADING
        self._engine: GenerationEngine | None = None
        self._started_s = 0.0
        self._ready_at_s = 0.0

    @property
    def state(self) -> EngineState:
        """What the engine is doing."""
        return self._state

    @property
    def ready_at_s(self) -> float:
        """When the model was ready, seconds since 1970; 0 before that."""
        return self._ready_at_s

    @property
    def is_alive(self) -> bool:
        """Whether this process can still become or is able to serve."""
        if self._state is EngineState.LOADING:
            return True
        return self._engine is not None and self._engine.stats().is_alive

    @property
    def readiness(self) -> str:
        """`ready`, or why new requests should go elsewhere: the state, `dead` or `stalled`."""
        if self._state is not EngineState.READY or self._engine is None:
            return self._state.value
        stats = self._engine.stats()
        if not stats.is_alive:
            return "dead"
        return "stalled" if stats.last_step_age_s > self._stall_timeout_s else "ready"

    def engine(self) -> GenerationEngine:
        """Return the engine, for a new request.

        Raises:
            EngineNotReadyError: It is still loading, draining, or loading failed.
            EngineStoppedError: It was stopped.
        """
        if self._state is EngineState.STOPPED:
            raise EngineStoppedError("the server is shutting down")
        if self._state is not EngineState.READY or self._engine is None:
            raise EngineNotReadyError(self._state)
        return self._engine

    def start(self) -> None:
        """Begin loading and return at once."""
        self._started_s = time.monotonic()
        loop = asyncio.get_running_loop()
        # A daemon thread: a model that takes minutes to load must not hold up an early Ctrl-C,
        # which the default executor would, because the loop waits for it.
        threading.Thread(
            target=self._load_and_report, args=(loop,), name="snapkv-loader", daemon=True
        ).start()

    async def drain(
        self, timeout_s: float, num_in_flight: Callable[[], int], is_hurried: Callable[[], bool]
    ) -> None:
        """Take no new requests, let those in flight finish, then stop the engine.

        Args:
            timeout_s: How long they get; those that are left are ended by the stop.
            num_in_flight: Tells how many requests are not answered yet.
            is_hurried: Asked again and again; true stops the wait.
        """
        if self._state is EngineState.READY:
            self._state = EngineState.DRAINING
            _log.info("drain_started", num_requests=num_in_flight(), timeout_s=timeout_s)
            give_up_s = time.monotonic() + timeout_s
            # Hurry comes from a signal handler, which can wake no task.
            while num_in_flight() and not is_hurried() and time.monotonic() < give_up_s:  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)
            _log.info("drain_finished", num_requests=num_in_flight())
        await self.stop()

    async def stop(self) -> None:
        """End what runs and stop the engine, off the event loop; harmless when called twice."""
        if self._state is EngineState.STOPPED:
            return
        self._state = EngineState.STOPPED
        if self._engine is None:
            return
        loop, stopped = asyncio.get_running_loop(), asyncio.Event()
        # A daemon thread again: at the end of the process nothing waits for an engine that hangs.
        threading.Thread(
            target=_stop_and_tell,
            args=(self._engine, loop, stopped),
            name="snapkv-stopper",
            daemon=True,
        ).start()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await stopped.wait()
        except TimeoutError:
            _log.error("engine_stop_timed_out", timeout_s=STOP_TIMEOUT_S)

    def _load_and_report(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            engine = self._load()
        except (ModelLoadError, InvalidParameterError) as error:
            _call_on(loop, partial(self._fail, " ".join(str(error).split())))
        except Exception as error:
            _log.exception("model_load_crashed")
            reason = f"loading the model raised {type(error).__name__}"
            _call_on(loop, partial(self._fail, reason))
        else:
            _call_on(loop, partial(self._serve, engine))

    def _serve(self, engine: GenerationEngine) -> None:
        if self._state is not EngineState.LOADING:
            return
        engine.start()
        self._engine = engine
        self._state = EngineState.READY
        self._ready_at_s = time.time()
        stats = engine.stats()
        _log.info(
            "engine_ready",
            model=engine.model_name,
            load_ms=round((time.monotonic() - self._started_s) * 1_000),
            max_model_len=engine.max_model_len,
            device=engine.device,
            dtype=engine.dtype,
            attention_backend=engine.attention_backend,
            page_size=engine.page_size,
            num_pages=stats.num_pages_total,
            kv_pool_bytes=stats.num_pages_total * stats.page_bytes,
            num_cache_tokens=engine.num_cache_tokens,
            num_default_sequences=engine.max_concurrent(
                self._default_compression, engine.config.default_max_new_tokens
            ),
        )
        self._on_ready(engine)

    def _fail(self, reason: str) -> None:
        if self._state is not EngineState.LOADING:
            return
        self._state = EngineState.FAILED
        _log.error("model_load_failed", reason=reason)
        self._on_failed(reason)


def _stop_and_tell(
    engine: GenerationEngine, loop: asyncio.AbstractEventLoop, stopped: asyncio.Event
) -> None:
    try:
        engine.stop()
    finally:
        _call_on(loop, stopped.set)


def _call_on(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    # The loop is closed when the process did not wait for this thread.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(callback)
