"""The seam between requests and formats of traces: thin, so that a format is one small file."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final, Protocol

import structlog

from app.records import GenerationRecord
from app.telemetry.tracing.headers import (
    ReadParent,
    TraceParent,
    amazon_header,
    new_trace_id,
)
from app.telemetry.tracing.sampling import LocalSampler

#: A stream's status is sent before it fails; what became of it is known under these names.
_OUTCOME_STATUS: Final = {"error": 500, "deadline": 504, "aborted": 499}

_log = structlog.get_logger("snapkv.tracing")


def log_lost(tracing: str, num: int, reason: str) -> None:
    """Say that segments or spans of the format `tracing` never reached their collector."""
    _log.warning("traces_lost", tracing=tracing, num_lost=num, reason=reason)


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """What became of a request.

    Attributes:
        method: HTTP method, one of the known ones.
        route: Template of its path, never the path itself.
        status: Status that was sent.
        outcome: What a route knew better than its status, as `http_request` lines have it.
    """

    method: str
    route: str
    status: int
    outcome: str | None

    @property
    def effective_status(self) -> int:
        """Status that tells what really became of it."""
        return _OUTCOME_STATUS.get(self.outcome or "", self.status)

    @property
    def is_error(self) -> bool:
        """Whether the caller was at fault, or too fast, or went away."""
        return 400 <= self.effective_status < 500

    @property
    def is_throttle(self) -> bool:
        """Whether the caller was too fast."""
        return self.effective_status == 429

    @property
    def is_fault(self) -> bool:
        """Whether the service was at fault."""
        return self.effective_status >= 500


class RequestTrace(Protocol):
    """The open trace of one request; used on the event loop.

    Attributes:
        trace_id: The trace's name as its format writes it, for log lines.
    """

    trace_id: str

    def add_generation(self, record: GenerationRecord) -> None:
        """Add what is known of a generation; ignored once the trace has ended."""

    def end(self, end: RequestEnd) -> None:
        """Close the trace and hand it on without waiting; called once, in the request's context."""


class TraceExporter(Protocol):
    """Opens traces in one format and gets them to a collector."""

    def open(self, trace_id: str, parent_id: str | None) -> RequestTrace:
        """Open the trace of a request.

        Args:
            trace_id: 32 hexadecimal digits.
            parent_id: 16 hexadecimal digits, the caller's place in the same trace.
        """

    def close(self) -> None:
        """Send what is left, for a bounded time; blocks."""


@dataclass(frozen=True, slots=True)
class BegunTrace:
    """A request's trace, if it gets one, and the header its answer gets, if any."""

    trace: RequestTrace | None
    header: str | None


class RequestTracer:
    """Decides whether a request is traced, by its caller's word first; never fails a request."""

    def __init__(
        self, exporter: TraceExporter, sampler: LocalSampler, read_parent: ReadParent
    ) -> None:
        """Trace with `exporter` what callers or else `sampler` chose.

        Args:
            exporter: Opens the traces.
            sampler: Asked about requests whose caller did not decide.
            read_parent: Reads the headers that the exporter's format knows.
        """
        self._exporter = exporter
        self._sampler = sampler
        self._read_parent = read_parent

    def begin(self, headers: Mapping[str, str]) -> BegunTrace:
        """Open the trace of a request, if it gets one."""
        try:
            parent = self._read_parent(headers)
            is_sampled = self._sampler.take() if parent.is_sampled is None else parent.is_sampled
            if not is_sampled:
                return BegunTrace(None, _echo(parent))
            trace_id = parent.trace_id or new_trace_id()
            trace = self._exporter.open(trace_id, parent.parent_id)
        except Exception:  # whoever takes notes must not cost the caller its answer
            _log.exception("trace_failed", step="begin")
            return BegunTrace(None, None)
        return BegunTrace(trace, amazon_header(trace_id, is_sampled=True))

    def end(self, trace: RequestTrace, end: RequestEnd) -> None:
        """Close a trace."""
        try:
            trace.end(end)
        except Exception:  # as above
            _log.exception("trace_failed", step="end")

    def close(self) -> None:
        """Send what is left, for a bounded time; blocks."""
        self._exporter.close()


def _echo(parent: TraceParent) -> str | None:
    # A caller that named a trace learns that nothing was added to it.
    return parent.trace_id and amazon_header(parent.trace_id, is_sampled=False)


_current: ContextVar[RequestTrace | None] = ContextVar("snapkv_request_trace", default=None)


@contextmanager
def current(trace: RequestTrace) -> Iterator[None]:
    """Make `trace` the one that this context's generations belong to."""
    token = _current.set(trace)
    try:
        yield
    finally:
        _current.reset(token)


class GenerationTraces:
    """The record sink that fills the trace of the request a generation belongs to."""

    def on_generation(self, record: GenerationRecord) -> None:
        """See `RecordSink.on_generation`."""
        trace = _current.get()
        if trace is not None:
            trace.add_generation(record)
