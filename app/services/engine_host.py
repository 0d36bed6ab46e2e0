"""Owns the engine's life in this process: loading in the background, serving, stopping."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from typing import Final

import structlog

from app.services.ports import GenerationEngine
from snapkv_core import EngineStoppedError, InvalidParameterError, ModelLoadError

LOADING_RETRY_AFTER_S: Final = 5.0

_log = structlog.get_logger("snapkv.engine")


class EngineState(StrEnum):
    """Where the engine is in its life; it only ever moves down this list."""

    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"
    STOPPED = "stopped"


class EngineNotReadyError(Exception):
    """The model is still loading, or could not be loaded.

    Attributes:
        state: What the engine is doing instead of serving.
        retry_after_s: Seconds after which trying again is sensible.
    """

    def __init__(self, state: EngineState, retry_after_s: float = LOADING_RETRY_AFTER_S) -> None:
        super().__init__(
            "the model is still loading; try again later"
            if state is EngineState.LOADING
            else "the model could not be loaded; this server cannot answer"
        )
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
    ) -> None:
        """Remember how to load.

        Args:
            load: Blocking; returns an engine that is warm and not started.
            on_ready: Called on the loop when requests can be served.
            on_failed: Called on the loop with one line that says why loading failed.
        """
        self._load = load
        self._on_ready = on_ready
        self._on_failed = on_failed
        self._state = EngineState.LOADING
        self._engine: GenerationEngine | None = None

    @property
    def state(self) -> EngineState:
        """What the engine is doing."""
        return self._state

    @property
    def is_alive(self) -> bool:
        """Whether this process can still become or is able to serve."""
        if self._state is EngineState.LOADING:
            return True
        return self._engine is not None and self._engine.stats().is_alive

    def engine(self) -> GenerationEngine:
        """Return the engine.

        Raises:
            EngineNotReadyError: It is still loading, or loading failed.
            EngineStoppedError: It was stopped.
        """
        if self._state is EngineState.STOPPED:
            raise EngineStoppedError("the server is shutting down")
        if self._engine is None:
            raise EngineNotReadyError(self._state)
        return self._engine

    def start(self) -> None:
        """Begin loading and return at once."""
        loop = asyncio.get_running_loop()
        # A daemon thread: a model that takes minutes to load must not hold up an early Ctrl-C,
        # which the default executor would, because the loop waits for it.
        threading.Thread(
            target=self._load_and_report, args=(loop,), name="snapkv-loader", daemon=True
        ).start()

    async def stop(self) -> None:
        """Abort what runs and stop the engine, off the event loop."""
        self._state = EngineState.STOPPED
        if self._engine is not None:
            await asyncio.to_thread(self._engine.stop)

    def _load_and_report(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            engine = self._load()
        except (ModelLoadError, InvalidParameterError) as error:
            self._report(loop, partial(self._fail, " ".join(str(error).split())))
        except Exception as error:
            _log.exception("model_load_crashed")
            reason = f"loading the model raised {type(error).__name__}"
            self._report(loop, partial(self._fail, reason))
        else:
            self._report(loop, partial(self._serve, engine))

    def _report(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        # The loop is closed when the server was stopped while the model was loading.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(callback)

    def _serve(self, engine: GenerationEngine) -> None:
        if self._state is EngineState.STOPPED:
            return
        engine.start()
        self._engine = engine
        self._state = EngineState.READY
        _log.info(
            "engine_ready",
            model=engine.model_name,
            max_model_len=engine.max_model_len,
            device=engine.device,
            dtype=engine.dtype,
        )
        self._on_ready(engine)

    def _fail(self, reason: str) -> None:
        if self._state is EngineState.STOPPED:
            return
        self._state = EngineState.FAILED
        _log.error("model_load_failed", reason=reason)
        self._on_failed(reason)
