"""Runs the HTTP server until it is told to stop or its model cannot be loaded."""

import asyncio
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Final, NoReturn

import uvicorn

from app.main import create_app
from app.settings import Settings
from app.telemetry.logging import configure_logging

#: For the answers to requests that were ended, once the drain is over.
_ANSWER_TIME_S: Final = 5


def run_server(settings: Settings) -> int:
    """Serve until SIGINT or SIGTERM.

    Returns:
        The exit status: 0 after a normal end, 1 when the model could not be loaded.
    """
    configure_logging(settings.log_level)
    failures: list[str] = []

    def stop_with(reason: str) -> None:
        failures.append(reason)
        server.should_exit = True

    app = create_app(settings, on_load_failed=stop_with)
    server = _DrainingServer(
        uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            # Unlike httptools it bounds the headers and keeps the body of a request that offers
            # an upgrade to HTTP/2; beside a model's milliseconds its own do not count.
            http="h11",
            log_config=None,
            # Requests are logged by the app, with their ids and without their query strings.
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=settings.shutdown_timeout_s + _ANSWER_TIME_S,
        ),
        end_requests=app.state.parts.engine_host.stop,
        after_s=settings.shutdown_timeout_s,
    )
    # uvicorn raises the signal that ended it once more, after a clean shutdown, for whatever
    # handler stood here before it; the default one would report a killed process.
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, _exit_cleanly)
    server.run()
    if failures:
        sys.stderr.write(f"error: {failures[0]}\n")
        return 1
    return 0


class _DrainingServer(uvicorn.Server):
    """Ends requests that outlast the drain itself, so that each still gets a proper answer.

    uvicorn would cancel them, which tells a client nothing but "Internal Server Error".
    """

    def __init__(
        self, config: uvicorn.Config, *, end_requests: Callable[[], Awaitable[None]], after_s: float
    ) -> None:
        super().__init__(config)
        self._end_requests = end_requests
        self._after_s = after_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, wait for running requests, then end those that are left."""
        ending = asyncio.create_task(self._end_late_requests())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end_late_requests(self) -> None:
        await asyncio.sleep(self._after_s)
        await self._end_requests()


def _exit_cleanly(signal_number: int, frame: FrameType | None) -> NoReturn:
    del signal_number, frame  # both signals end the server in the same way
    raise SystemExit(0)
