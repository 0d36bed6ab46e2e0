"""Stands where an OTLP collector stands: takes spans from real HTTP requests."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue

from tests.support.app_client import until

PATH = "/v1/traces"


@dataclass(frozen=True)
class ReceivedSpan:
    """A span as it came over the wire; ids are hexadecimal, times nanoseconds since 1970."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    status: int
    started_ns: int
    ended_ns: int
    attributes: dict[str, object] = field(hash=False)

    @property
    def duration_ms(self) -> float:
        """How long it took."""
        return (self.ended_ns - self.started_ns) / 1e6


class OtlpCollector:
    """Listens on a free port of 127.0.0.1 for as long as it is entered.

    Attributes:
        status: What it answers.
        before_answer: Called before it answers; may block.
    """

    def __init__(self) -> None:
        self.status = 200
        self.before_answer: Callable[[], object] = lambda: None
        self.bodies: list[bytes] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.path.partition("?")[0] == PATH
                assert self.headers["Content-Type"] == "application/x-protobuf"
                collector.bodies.append(body)
                collector.before_answer()
                self.send_response(collector.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                del format, args  # standard error is the tests'

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}{PATH}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )

    def __enter__(self) -> "OtlpCollector":
        self._thread.start()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def received(self) -> list[ReceivedSpan]:
        """Return the spans that have arrived, in order."""
        return [span for body in list(self.bodies) for span in _spans_of(body)]

    async def spans(self, num: int, within_s: float = 10.0) -> list[ReceivedSpan]:
        """Return the spans once there are `num` of them, and no more."""
        await until(lambda: len(self.received()) >= num, within_s)
        spans = self.received()
        assert len(spans) == num, [span.name for span in spans]
        return spans


def _spans_of(body: bytes) -> list[ReceivedSpan]:
    request = ExportTraceServiceRequest.FromString(body)
    return [
        ReceivedSpan(
            service=str(_values(resource_spans.resource.attributes)["service.name"]),
            name=span.name,
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent_id=span.parent_span_id.hex(),
            kind=span.kind,
            status=span.status.code,
            started_ns=span.start_time_unix_nano,
            ended_ns=span.end_time_unix_nano,
            attributes=_values(span.attributes),
        )
        for resource_spans in request.resource_spans
        for scope_spans in resource_spans.scope_spans
        for span in scope_spans.spans
    ]


def _values(attributes: "list[KeyValue]") -> dict[str, object]:
    return {
        item.key: getattr(item.value, item.value.WhichOneof("value") or "string_value")
        for item in attributes
    }
