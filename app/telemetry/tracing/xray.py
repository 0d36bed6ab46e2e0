"""Traces as X-Ray segments, one per request, built with the X-Ray SDK's documents."""

import re
from collections.abc import Callable
from typing import Any, Final

from aws_xray_sdk.core.models.subsegment import Subsegment
from aws_xray_sdk.core.recorder import SERVICE_INFO, XRAY_META

from app.records import GenerationRecord
from app.telemetry.tracing.contents import Phase, annotations_of, kv_cache_of, phases_of
from app.telemetry.tracing.headers import amazon_id
from app.telemetry.tracing.trace import RequestEnd
from app.telemetry.tracing.xray_context import CONTEXT, RequestSegment, instrument_botocore
from app.telemetry.tracing.xray_sender import SegmentSender

#: What X-Ray does not take in a name; the SDK warns of each such name, so of each request.
_NOT_IN_NAMES: Final = re.compile(r"[^\w\s.:/%&#=+\\@-]")


class XRayExporter:
    """Opens segments and sends them to the X-Ray daemon."""

    def __init__(
        self, service_name: str, daemon_address: str, count_lost: Callable[[int], None]
    ) -> None:
        """Name segments `service_name` and send them to `daemon_address`, host and port.

        `count_lost` is told of segments that cannot be sent.

        Raises:
            SettingsError: The address cannot be read.
        """
        self._name = _NOT_IN_NAMES.sub("_", service_name)
        self._sender = SegmentSender(daemon_address, count_lost)
        instrument_botocore()

    @property
    def num_lost(self) -> int:
        """Segments that could not be sent."""
        return self._sender.losses.num_lost

    def open(self, trace_id: str, parent_id: str | None) -> "XRayTrace":
        """See `TraceExporter.open`; AWS calls of this context become parts of the segment."""
        segment = RequestSegment(self._name, amazon_id(trace_id), parent_id, self._sender.send)
        segment.set_aws(XRAY_META)
        segment.set_service(SERVICE_INFO)
        CONTEXT.put_segment(segment)
        return XRayTrace(segment)

    def close(self) -> None:
        """See `TraceExporter.close`."""
        self._sender.close()


class XRayTrace:
    """One request's segment."""

    def __init__(self, segment: RequestSegment) -> None:
        """Fill and close `segment`."""
        self.trace_id: str = segment.trace_id
        self._segment = segment

    def add_generation(self, record: GenerationRecord) -> None:
        """See `RequestTrace.add_generation`."""
        segment = self._segment
        if not segment.in_progress:
            return
        for name, value in annotations_of(record).items():
            segment.put_annotation(name, value)
        kv_cache = kv_cache_of(record)
        if kv_cache is not None:
            segment.put_metadata("kv_cache", kv_cache)
        for phase in phases_of(record):
            self._add(phase, segment)

    def end(self, end: RequestEnd) -> None:
        """See `RequestTrace.end`."""
        segment = self._segment
        segment.put_http_meta("method", end.method)
        segment.put_http_meta("url", end.route)
        segment.put_http_meta("status", end.status)
        segment.apply_status_code(end.effective_status)
        segment.close()
        CONTEXT.clear_trace_entities()
        segment.send_when_complete()

    def _add(self, phase: Phase, parent: Any) -> None:
        # The parent is named, never looked up: these times are over, and other things may be open.
        subsegment = Subsegment(phase.name, "local", self._segment)
        subsegment.start_time = phase.started_s
        parent.add_subsegment(subsegment)
        for part in phase.parts:
            self._add(part, subsegment)
        subsegment.close(phase.ended_s)
