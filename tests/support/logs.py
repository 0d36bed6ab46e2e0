"""Takes the process's log lines for the time of a test."""

import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import structlog

from app.telemetry.logging import configure_logging


@contextmanager
def captured_log(level: str = "debug") -> Iterator[io.StringIO]:
    """Send every log line to a buffer, and put logging back as it was afterwards."""
    root = logging.getLogger()
    handlers, root_level = root.handlers[:], root.level
    stream = io.StringIO()
    configure_logging(level, stream)
    try:
        yield stream
    finally:
        root.handlers, root.level = handlers, root_level
        structlog.reset_defaults()


def events_named(log: io.StringIO, name: str) -> list[dict[str, Any]]:
    """Return the log lines of one event."""
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    return [line for line in lines if line["event"] == name]
