"""OpenTelemetry spans as a collector gets them, in protobuf over real HTTP requests."""

import asyncio
import io
import json
import threading
from collections.abc import Iterator

import httpx
import pytest

from app.main import create_app
from app.telemetry.tracing import otlp
from tests.support.app_client import fake_service, listening, settings_for_tests, until
from tests.support.fake_engine import FakeEngine
from tests.support.logs import captured_log
from tests.support.otlp_collector import OtlpCollector, ReceivedSpan
from tests.support.served import free_port

SECRET = "tangerine"
TRACE = "5759e988bd862e3fe1be46a994272793"
PARENT = "53995c3f42cd8ad8"
SERVER, INTERNAL = 2, 1
UNSET, ERROR = 0, 2


@pytest.fixture
def collector() -> Iterator[OtlpCollector]:
    """Listen where the service sends its spans."""
    with OtlpCollector() as collector:
        yield collector


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """Capture every log line of the process at the lowest level."""
    with captured_log() as stream:
        yield stream


def traced(endpoint: str, **settings: object) -> dict[str, object]:
    """Return settings that trace every request."""
    return {
        "tracing": "otlp",
        "otlp_endpoint": endpoint,
        "trace_sampling_rate": 1.0,
        **settings,
    }


def by_name(spans: list[ReceivedSpan]) -> dict[str, ReceivedSpan]:
    """Return spans by their names, which differ."""
    named = {span.name: span for span in spans}
    assert len(named) == len(spans)
    return named


@pytest.mark.parametrize("stream", [False, True])
async def test_spans_say_what_was_done(collector: OtlpCollector, stream: bool) -> None:
    """The same names as in X-Ray; the measured times as spans within the request's."""
    settings = traced(collector.endpoint, service_name="chat")
    async with fake_service(FakeEngine(), **settings) as client:
        body = {"prompt": "w " * 1_024, "max_new_tokens": 3, "stream": stream}
        answer = await client.post("/generate", json=body)
    spans = by_name(await collector.spans(5))
    request = spans.pop("POST /generate")
    assert (request.service, request.kind, request.status) == ("chat", SERVER, UNSET)
    assert request.attributes == {
        "http.request.method": "POST",
        "http.route": "/generate",
        "http.response.status_code": 200,
        "model": "fake",
        "input_tokens": 1_024,
        "method": "snapkv",
        "finish_reason": "length",
        "snapshot": "off",
        "kv_cache.original_entries": 1_024,
        "kv_cache.compressed_entries": 512.0,
        "kv_cache.compression_ratio": 2.0,
    }
    assert request.parent_id == ""
    assert request.ended_ns > request.started_ns
    root = f"1-{request.trace_id[:8]}-{request.trace_id[8:]}"
    assert answer.headers["X-Amzn-Trace-Id"] == f"Root={root};Sampled=1"
    assert {name: round(span.duration_ms, 1) for name, span in spans.items()} == {
        "queue": 1.0,
        "prefill": 20.0,
        "compress": 0.5,
        "decode": 30.0,
    }
    assert {span.trace_id for span in spans.values()} == {request.trace_id}
    compress = spans.pop("compress")
    assert compress.parent_id == spans["prefill"].span_id
    assert {span.parent_id for span in spans.values()} == {request.span_id}
    assert {span.kind for span in spans.values()} == {INTERNAL}


@pytest.mark.parametrize(
    ("headers", "parent_id"),
    [
        ({"traceparent": f"00-{TRACE}-{PARENT}-01"}, PARENT),
        ({"X-Amzn-Trace-Id": f"Root=1-{TRACE[:8]}-{TRACE[8:]};Parent={PARENT};Sampled=1"}, PARENT),
        ({"X-Amzn-Trace-Id": f"Root=1-{TRACE[:8]}-{TRACE[8:]};Sampled=1"}, ""),
    ],
    ids=["w3c", "amazon", "amazon-root"],
)
async def test_callers_trace_goes_on(
    collector: OtlpCollector, log: io.StringIO, headers: dict[str, str], parent_id: str
) -> None:
    settings = traced(collector.endpoint, trace_sampling_rate=0.0, trace_reservoir_per_s=0)
    async with fake_service(FakeEngine(), **settings) as client:
        answer = await client.post("/generate", json={"prompt": "a"}, headers=headers)
        await client.post("/generate", json={"prompt": "a"})
    request = by_name(await collector.spans(5))["POST /generate"]
    assert (request.trace_id, request.parent_id) == (TRACE, parent_id)
    assert answer.headers["X-Amzn-Trace-Id"] == f"Root=1-{TRACE[:8]}-{TRACE[8:]};Sampled=1"
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    assert {line.get("trace_id") for line in lines} == {None, TRACE}


async def test_caller_that_declines_is_not_traced(collector: OtlpCollector) -> None:
    async with fake_service(FakeEngine(), **traced(collector.endpoint)) as client:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
        answer = await client.post("/generate", json={"prompt": "a"}, headers=headers)
    assert answer.headers["X-Amzn-Trace-Id"] == f"Root=1-{TRACE[:8]}-{TRACE[8:]};Sampled=0"
    assert collector.received() == []


async def test_failures_are_marked(collector: OtlpCollector) -> None:
    """A fault is an error by OpenTelemetry's rules, a caller's mistake is not."""
    engine = FakeEngine()
    async with fake_service(engine, **traced(collector.endpoint)) as client:
        await client.post("/generate", json={"prompt": "a", "n": 0})
        engine.behaviour.queue_full = True
        await client.post("/generate", json={"prompt": "a"})
        engine.behaviour.queue_full = False
        engine.behaviour.abort_after = 1
        await client.post("/generate", json={"prompt": "a b", "stream": True})
    spans = [span for span in await collector.spans(6) if span.kind == SERVER]
    flags = [
        {name for name in ("error", "throttle", "fault") if span.attributes.get(name)}
        for span in spans
    ]
    assert flags == [{"error"}, {"error", "throttle"}, {"fault"}]
    assert [span.status for span in spans] == [UNSET, UNSET, ERROR]
    assert spans[2].attributes["http.response.status_code"] == 200


async def test_client_that_leaves_ends_its_span(collector: OtlpCollector) -> None:
    engine = FakeEngine()
    engine.behaviour.stall_after = 1
    app = create_app(settings_for_tests(**traced(collector.endpoint)), engine)
    async with listening(app) as url, httpx.AsyncClient(base_url=url) as client:
        body = {"prompt": "a b c", "stream": True}
        sending = asyncio.create_task(client.post("/generate", json=body))
        await until(lambda: engine.num_running == 1)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        await until(lambda: engine.aborted)
    (span,) = await collector.spans(1)
    assert span.attributes["finish_reason"] == "abort"
    assert span.attributes["error"] is True


async def test_nothing_secret_is_in_a_span(collector: OtlpCollector) -> None:
    async with fake_service(FakeEngine(), **traced(collector.endpoint)) as client:
        await client.get("/health/live")
        await client.post(
            f"/generate?key={SECRET}",
            json={"prompt": SECRET},
            headers={"Authorization": f"Bearer {SECRET}", "User-Agent": SECRET},
        )
        await client.get(f"/{SECRET}")
    spans = await collector.spans(6)
    assert {span.name for span in spans if span.kind == SERVER} == {
        "POST /generate",
        "GET unmatched",
    }
    assert not any(SECRET.encode() in body for body in collector.bodies)


def losses(log: io.StringIO) -> int:
    """Return how many spans the log says were lost."""
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    return sum(line["num_lost"] for line in lines if line["event"] == "traces_lost")


@pytest.mark.parametrize("failure", ["refused", "unauthorised", "broken"])
async def test_collector_that_takes_nothing_has_no_effect(
    collector: OtlpCollector,
    log: io.StringIO,
    monkeypatch: pytest.MonkeyPatch,
    failure: str,
) -> None:
    """Answers are what they are without tracing; the log counts spans and quotes no address."""
    monkeypatch.setattr(otlp, "EXPORT_TIMEOUT_S", 0.2)
    collector.status = {"unauthorised": 401, "broken": 500}.get(failure, 200)
    endpoint = collector.endpoint
    if failure == "refused":
        endpoint = f"http://127.0.0.1:{free_port()}/v1/traces"
    async with fake_service(FakeEngine(), **traced(f"{endpoint}?key={SECRET}")) as client:
        answer = await client.post("/generate", json={"prompt": "a b"})
    async with fake_service(FakeEngine()) as client:
        expected = (await client.post("/generate", json={"prompt": "a b"})).json()
    assert {**answer.json(), "id": expected["id"]} == expected
    assert losses(log) == 5
    assert SECRET not in log.getvalue()


async def test_what_the_queue_drops_is_lost(
    collector: OtlpCollector, monkeypatch: pytest.MonkeyPatch, log: io.StringIO
) -> None:
    """Two spans are being sent and four wait; most of the others are counted at once."""
    may_answer = threading.Event()
    collector.before_answer = lambda: may_answer.wait(10)
    monkeypatch.setattr(otlp, "MAX_QUEUED", 4)
    monkeypatch.setattr(otlp, "MAX_BATCH", 2)
    monkeypatch.setattr(otlp, "CLOSE_TIMEOUT_S", 0.1)
    try:
        async with fake_service(FakeEngine(), **traced(collector.endpoint)) as client:
            for _ in range(10):
                await client.post("/generate", json={"prompt": "a"})
            metrics = (await client.get("/metrics")).text
        assert "snapkv_traces_lost_total 44.0" in metrics
        assert losses(log) == 50
    finally:
        may_answer.set()


async def test_collector_that_hangs_holds_up_neither_answers_nor_the_shutdown(
    collector: OtlpCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_answer = threading.Event()
    collector.before_answer = lambda: may_answer.wait(10)
    monkeypatch.setattr(otlp, "CLOSE_TIMEOUT_S", 0.2)
    try:
        async with asyncio.timeout(5):
            async with fake_service(FakeEngine(), **traced(collector.endpoint)) as client:
                for _ in range(3):
                    answer = await client.post("/generate", json={"prompt": "a"})
                    assert answer.status_code == 200
        assert len(collector.bodies) == 1
    finally:
        may_answer.set()
