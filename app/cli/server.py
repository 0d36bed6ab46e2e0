"""Runs the HTTP server until it is told to stop or its model cannot be loaded."""

import asyncio
import gc
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final, NoReturn

import uvicorn
from fastapi import FastAPI

from app.api.dependencies import AppParts
from app.cli.protocol import ImpatientProtocol
from app.main import LoadEngine, create_admin_app, create_app
from app.services.ports import GenerationEngine
from app.settings import Settings
from app.telemetry.logging import configure_logging
from snapkv_core import AsyncEngine, EngineConfig, EngineObserver

#: For answers that are on their way when the drain is over, and after a second signal.
_ANSWER_TIME_S: Final = 5
_HURRIED_ANSWER_TIME_S: Final = 1


def run_server(
    settings: Settings,
    load_engine: LoadEngine = AsyncEngine.load,
    *,
    reload_settings: Callable[[], Settings] | None = None,
) -> int:
    """Serve until SIGINT or SIGTERM.

    After the first signal requests in flight get `settings.shutdown_timeout_s` to finish while new
    ones are refused; a second signal ends them at once.

    Args:
        settings: Settings, as `load_settings` returns them.
        load_engine: Loads the engine; blocking.
        reload_settings: Reads the settings anew while the server runs; blocking.

    Returns:
        The exit status: 0 after a normal end, 1 when the model could not be loaded.

    Raises:
        SettingsError: A setting is not acceptable, or the server would be open to strangers.
    """
    settings.require_access_control()
    configure_logging(settings.log_level)
    failures: list[str] = []

    def stop_with(reason: str) -> None:
        failures.append(reason)
        server.should_exit = True

    app = create_app(
        settings,
        load_engine=settled(load_engine),
        on_load_failed=stop_with,
        reload_settings=reload_settings,
    )
    parts: AppParts = app.state.parts
    server = _DrainingServer(
        _config(app, settings.host, settings.port, _ANSWER_TIME_S),
        parts=parts,
        drain_timeout_s=settings.shutdown_timeout_s,
        admin=_admin_server(settings, parts),
    )
    # Before and after uvicorn's own handlers, a signal ends the process as cleanly as between.
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, _exit_cleanly)
    server.run()
    if failures:
        sys.stderr.write(f"error: {failures[0]}\n")
        return 1
    return 0


def settled(load_engine: LoadEngine) -> LoadEngine:
    """Return a loader that takes what there is after it out of Python's collection of garbage.

    Modules and model stay as long as the process. A full collection walked through all of them,
    for 240 ms on the machine of docs/benchmarks.md, while neither the event loop nor the engine
    got anywhere.
    """

    def load(config: EngineConfig, observer: EngineObserver) -> GenerationEngine:
        engine = load_engine(config, observer)
        gc.collect()
        gc.freeze()
        return engine

    return load


def _config(app: FastAPI, host: str, port: int, answer_time_s: int) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        host=host,
        port=port,
        # On h11: unlike httptools it bounds the headers and keeps the body of a request that offers
        # an upgrade to HTTP/2; beside a model's milliseconds its own do not count.
        http=ImpatientProtocol,
        log_config=None,
        # Requests are logged by the app, with their ids and without their query strings.
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=answer_time_s,
    )


def _admin_server(settings: Settings, parts: AppParts) -> "_SideServer | None":
    if settings.admin_port is None:
        return None
    app = create_admin_app(parts)
    return _SideServer(
        _config(app, settings.admin_host, settings.admin_port, _HURRIED_ANSWER_TIME_S)
    )


class _SideServer(uvicorn.Server):
    """Serves beside another server, on its event loop, until it is told to end."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        # Here and not on the event loop: an address that is taken ends the process at its start.
        self._socket = config.bind_socket()
        self._serving: asyncio.Task[None] | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the other server."""
        yield

    def begin(self) -> None:
        """Serve from now on."""
        self._serving = asyncio.create_task(self.serve(sockets=[self._socket]))

    async def end(self) -> None:
        """Serve no longer."""
        self.should_exit = True
        if self._serving is not None:
            await self._serving


class _DrainingServer(uvicorn.Server):
    """Goes on accepting connections after a signal, until requests in flight have ended.

    uvicorn closes its sockets at once: health checks and new requests would find nobody who tells
    them to go elsewhere. And it cancels requests that take too long, which tells a client nothing
    but "Internal Server Error".
    """

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        parts: AppParts,
        drain_timeout_s: float,
        admin: _SideServer | None,
    ) -> None:
        super().__init__(config)
        self._admin = admin
        self._parts = parts
        self._drain_timeout_s = drain_timeout_s
        self._is_hurried = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take a signal; uvicorn's own would raise it again at the end, as if it had killed us."""
        del sig, frame  # both signals mean the same
        self._is_hurried = self.should_exit
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to serve, on both ports."""
        await super().startup(sockets)
        if self._admin is not None:
            self._admin.begin()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain while the sockets are open, then let uvicorn close what is left."""
        await self._parts.engine_host.drain(
            self._drain_timeout_s,
            lambda: self._parts.generation.num_in_flight,
            lambda: self._is_hurried,
        )
        if self._is_hurried:
            self.config.timeout_graceful_shutdown = _HURRIED_ANSWER_TIME_S
        await super().shutdown(sockets)
        if self._admin is not None:
            await self._admin.end()


def _exit_cleanly(signal_number: int, frame: FrameType | None) -> NoReturn:
    del signal_number, frame  # both signals end the server in the same way
    raise SystemExit(0)
