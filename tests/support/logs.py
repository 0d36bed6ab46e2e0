"""Takes the process's log lines for the time of a test."""

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager

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
