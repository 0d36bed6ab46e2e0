"""Runs the HTTP server until it is told to stop or its model cannot be loaded."""

import signal
import sys
from types import FrameType
from typing import NoReturn

import uvicorn

from app.main import create_app
from app.settings import Settings
from app.telemetry.logging import configure_logging


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

    server = uvicorn.Server(
        uvicorn.Config(
            create_app(settings, on_load_failed=stop_with),
            host=settings.host,
            port=settings.port,
            log_config=None,
            # Requests are logged by the app, with their ids and without their query strings.
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=settings.shutdown_timeout_s,
        )
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


def _exit_cleanly(signal_number: int, frame: FrameType | None) -> NoReturn:
    del signal_number, frame  # both signals end the server in the same way
    raise SystemExit(0)
