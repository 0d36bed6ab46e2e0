"""Traces as OpenTelemetry spans, sent to a collector over HTTP; no global provider is touched."""

import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    Tracer,
    set_span_in_context,
)

from app.losses import LossCount
from app.records import GenerationRecord
from app.telemetry.tracing.contents import Phase, annotations_of, kv_cache_of, phases_of
from app.telemetry.tracing.outstanding import Outstanding
from app.telemetry.tracing.trace import RequestEnd, log_lost

EXPORT_TIMEOUT_S: Final = 5.0
EXPORT_INTERVAL_S: Final = 2.0
#: Spans that may wait; a request has up to five.
MAX_QUEUED: Final = 8_192
MAX_BATCH: Final = 512
CLOSE_TIMEOUT_S: Final = 5.0

#: Its lines quote the collector's address and answer, in which keys may be; losses are counted.
_EXPORTER_LOGGER: Final = "opentelemetry.exporter.otlp.proto.http.trace_exporter"


class OtlpExporter:
    """Opens spans and sends them in batches, on a thread of the SDK's."""

    def __init__(
        self,
        service_name: str,
        endpoint: str,
        count_lost: Callable[[int], None],
        *,
        interval_s: float = EXPORT_INTERVAL_S,
    ) -> None:
        """Send spans of `service_name` to `endpoint`, the collector's whole address.

        `count_lost` is told of spans that the collector did not take or that had to be dropped.
        """
        logging.getLogger(_EXPORTER_LOGGER).setLevel(logging.CRITICAL + 1)
        self._losses = LossCount(partial(log_lost, "otlp"), count_lost)
        # The SDK holds a full queue and the batch that is being sent.
        self._outstanding = Outstanding(self._losses, MAX_QUEUED + MAX_BATCH)
        self._ids = _GivenTraceIds()
        self._provider = TracerProvider(
            sampler=ALWAYS_ON,
            resource=Resource.create({SERVICE_NAME: service_name}),
            id_generator=self._ids,
            # Its hook would wait for a collector that is away, without a bound.
            shutdown_on_exit=False,
        )
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)
        self._provider.add_span_processor(
            _CountingProcessor(
                exporter,
                self._outstanding,
                max_queue_size=MAX_QUEUED,
                schedule_delay_millis=interval_s * 1_000,
                max_export_batch_size=MAX_BATCH,
                export_timeout_millis=EXPORT_TIMEOUT_S * 1_000,
            )
        )
        self._tracer = self._provider.get_tracer("snapkv")

    @property
    def num_lost(self) -> int:
        """Spans that were given up."""
        return self._losses.num_lost

    def open(self, trace_id: str, parent_id: str | None) -> "OtlpTrace":
        """See `TraceExporter.open`."""
        context = Context()
        if parent_id is None:
            self._ids.next_trace_id = int(trace_id, 16)
        else:
            parent = SpanContext(
                trace_id=int(trace_id, 16),
                span_id=int(parent_id, 16),
                is_remote=True,
                trace_flags=TraceFlags(TraceFlags.SAMPLED),
            )
            context = set_span_in_context(NonRecordingSpan(parent), context)
        span = self._tracer.start_span("request", context, SpanKind.SERVER)
        return OtlpTrace(trace_id, span, self._tracer)

    def close(self) -> None:
        """See `TraceExporter.close`."""
        # The SDK's own calls take as long as a collector that accepts and says nothing.
        closing = threading.Thread(target=self._close, name="otlp-close", daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)
        self._outstanding.give_up()

    def _close(self) -> None:
        self._provider.force_flush()
        self._provider.shutdown()


class OtlpTrace:
    """One request's span and those in it."""

    def __init__(self, trace_id: str, span: Span, tracer: Tracer) -> None:
        """Fill and end `span`."""
        self.trace_id = trace_id
        self._span = span
        self._tracer = tracer

    def add_generation(self, record: GenerationRecord) -> None:
        """See `RequestTrace.add_generation`."""
        if not self._span.is_recording():
            return
        self._span.set_attributes(annotations_of(record))
        for name, value in (kv_cache_of(record) or {}).items():
            self._span.set_attribute(f"kv_cache.{name}", value)
        for phase in phases_of(record):
            self._add(phase, self._span)

    def end(self, end: RequestEnd) -> None:
        """See `RequestTrace.end`."""
        span = self._span
        span.update_name(f"{end.method} {end.route}")
        span.set_attributes(
            {
                "http.request.method": end.method,
                "http.route": end.route,
                "http.response.status_code": end.status,
            }
        )
        # X-Ray's names; by OpenTelemetry's rules a server's span is no error when its caller is.
        for name, is_marked in (
            ("error", end.is_error),
            ("throttle", end.is_throttle),
            ("fault", end.is_fault),
        ):
            if is_marked:
                span.set_attribute(name, True)
        if end.is_fault:
            span.set_status(Status(StatusCode.ERROR))
        span.end()

    def _add(self, phase: Phase, parent: Span) -> None:
        context = set_span_in_context(parent, Context())
        span = self._tracer.start_span(phase.name, context, start_time=_ns(phase.started_s))
        for part in phase.parts:
            self._add(part, span)
        span.end(_ns(phase.ended_s))


class _GivenTraceIds(IdGenerator):
    """Lets a caller's trace go on although it named no span of it; used on the event loop."""

    def __init__(self) -> None:
        self.next_trace_id: int | None = None

    def generate_span_id(self) -> int:
        # Not from `random`, which a library may seed alike in every replica.
        return secrets.randbits(64) or 1

    def generate_trace_id(self) -> int:
        trace_id, self.next_trace_id = self.next_trace_id, None
        return trace_id or secrets.randbits(128) or 1


class _CountingProcessor(BatchSpanProcessor):
    """Counts the spans that end, since the SDK tells nobody how many its queue drops."""

    def __init__(self, exporter: SpanExporter, outstanding: Outstanding, **options: Any) -> None:
        super().__init__(_CountingExporter(exporter, outstanding), **options)
        self._outstanding = outstanding

    def on_end(self, span: ReadableSpan) -> None:
        if self._outstanding.take():
            super().on_end(span)


class _CountingExporter(SpanExporter):
    """Counts the spans that the real exporter sent or gave up."""

    def __init__(self, exporter: SpanExporter, outstanding: Outstanding) -> None:
        self._exporter = exporter
        self._outstanding = outstanding

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result = self._exporter.export(spans)
        except Exception as error:
            self._outstanding.settle(len(spans), type(error).__name__)
            return SpanExportResult.FAILURE
        is_sent = result is SpanExportResult.SUCCESS
        self._outstanding.settle(len(spans), None if is_sent else "not_taken")
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


def _ns(seconds: float) -> int:
    return int(seconds * 1_000_000_000)
