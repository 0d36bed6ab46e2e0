"""Owns the shape of a log line: one JSON object, ours and the libraries' alike, to one stream.

No prompt or answer is handed to it, and it drops the place through which one could slip in:
messages of exceptions. An access log of addresses would be another, so the server writes none.
"""

import logging
import sys
import traceback
from typing import Any, Final, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from app.telemetry.redaction import redact

INFERENCE_COMPLETE: Final = "inference_complete"
KV_CACHE_COMPRESSED: Final = "kv_cache_compressed"
SNAPSHOT_LOOKED_UP: Final = "snapshot_looked_up"
HTTP_REQUEST: Final = "http_request"
UNHANDLED_ERROR: Final = "unhandled_error"
GENERATION_METRICS: Final = "generation_metrics"
ENGINE_METRICS: Final = "engine_metrics"

#: Logger of lines that are metrics; they are written whatever the level.
METRICS_LOGGER: Final = "snapkv.metrics"

#: Frames of a traceback that are logged, counted from the innermost.
MAX_LOGGED_FRAMES: Final = 20

#: Libraries that log without a handler of their own from here on.
_PROPAGATING: Final = (
    "uvicorn",
    "uvicorn.error",
    "uvicorn.access",
    "transformers",
    "huggingface_hub",
)
#: Their debug lines quote headers and bodies, so secrets and texts.
_QUOTING: Final = ("boto3", "botocore", "s3transfer", "urllib3")


def configure_logging(level: str, stream: TextIO | None = None) -> None:
    """Send every log record of the process to one stream, one JSON object per line.

    Args:
        level: Least level that is logged: `debug`, `info`, `warning` or `error`.
        stream: Where lines go; None takes standard output.
    """
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.ExtraAdder(allow=("request_id",)),
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        summarise_exception,
    ]
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            redact,
            structlog.processors.JSONRenderer(),
        ],
    )
    handler = logging.StreamHandler(stream if stream is not None else sys.stdout)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    for name in _PROPAGATING:
        logger = logging.getLogger(name)
        logger.handlers = []
        logger.propagate = True
    for name in _QUOTING:
        logging.getLogger(name).setLevel(max(root.level, logging.WARNING))
    logging.getLogger(METRICS_LOGGER).setLevel(logging.INFO)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )


def summarise_exception(
    logger: WrappedLogger, method_name: str, event_dict: EventDict
) -> EventDict:
    """Replace an exception by its type and the places it passed.

    Its message is left out: many libraries quote the value that they could not handle, and that
    value may be a prompt.
    """
    exc_info: Any = event_dict.pop("exc_info", None)
    if exc_info is True:
        exc_info = sys.exc_info()
    if isinstance(exc_info, BaseException):
        exc_info = (type(exc_info), exc_info, exc_info.__traceback__)
    if not exc_info or exc_info[0] is None:
        return event_dict
    frames = traceback.extract_tb(exc_info[2])[-MAX_LOGGED_FRAMES:]
    event_dict["error_type"] = exc_info[0].__name__
    event_dict["stack"] = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
    return event_dict
