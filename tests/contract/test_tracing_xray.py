"""X-Ray segments as the daemon gets them, over a real UDP socket."""

import asyncio
import io
import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from app.main import create_app
from app.settings import SettingsError
from app.telemetry.tracing import xray_sender
from tests.support.app_client import fake_service, listening, settings_for_tests, until
from tests.support.fake_engine import FakeEngine
from tests.support.logs import captured_log
from tests.support.markdown import ROOT, blocks_of, shape
from tests.support.xray_daemon import XRayDaemon, free_udp_address

PAGE = ROOT / "docs" / "tracing.md"
SECRET = "tangerine"
TRACE = "1-5759e988-bd862e3fe1be46a994272793"
PARENT = "53995c3f42cd8ad8"


@pytest.fixture
def daemon() -> Iterator[XRayDaemon]:
    """Listen where the service sends its segments."""
    with XRayDaemon() as daemon:
        yield daemon


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """Capture every log line of the process at the lowest level."""
    with captured_log() as stream:
        yield stream


def traced(daemon: XRayDaemon | str, **settings: object) -> dict[str, object]:
    """Return settings that trace every request."""
    address = daemon if isinstance(daemon, str) else daemon.address
    return {
        "tracing": "xray",
        "xray_daemon_address": address,
        "trace_sampling_rate": 1.0,
        **settings,
    }


def lines_of(log: io.StringIO) -> list[dict[str, Any]]:
    """Parse the log."""
    return [json.loads(line) for line in log.getvalue().splitlines()]


def parts_of(segment: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the direct subsegments by name."""
    return {part["name"]: part for part in segment.get("subsegments", [])}


def ms_of(part: dict[str, Any]) -> float:
    """Return how long a subsegment took."""
    duration_s: float = part["end_time"] - part["start_time"]
    return round(duration_s * 1e3, 1)


def flags_of(segment: dict[str, Any]) -> set[str]:
    """Return what a segment is marked as."""
    return {name for name in ("error", "throttle", "fault") if segment.get(name)}


def documented_segment() -> dict[str, Any]:
    """Return the segment that the documentation shows."""
    (block,) = [block for block in blocks_of(PAGE) if block.language == "json"]
    segment: dict[str, Any] = json.loads(block.text)
    return segment


@pytest.mark.parametrize("stream", [False, True])
async def test_segment_is_the_documented_one(daemon: XRayDaemon, stream: bool) -> None:
    """Names and kinds of all its fields, those of the subsegments included."""
    async with fake_service(FakeEngine(), **traced(daemon)) as client:
        body = {"prompt": "w " * 1_024, "max_new_tokens": 3, "stream": stream}
        headers = {"X-Amzn-Trace-Id": f"Root={TRACE};Parent={PARENT};Sampled=1"}
        await client.post("/generate", json=body, headers=headers)
    segment = await daemon.segment()
    assert shape(segment) == shape(documented_segment())
    assert {name: shape(part) for name, part in parts_of(segment).items()} == {
        name: shape(part) for name, part in parts_of(documented_segment()).items()
    }


async def test_segment_says_what_was_done(daemon: XRayDaemon) -> None:
    """Annotations, metadata, HTTP, and the measured times in their order."""
    async with fake_service(FakeEngine(), **traced(daemon, service_name="chat (eu)")) as client:
        body = {"prompt": "w " * 1_024, "max_new_tokens": 3}
        await client.post("/generate", json=body)
    segment = await daemon.segment()
    assert segment["name"] == "chat _eu_"
    assert segment["annotations"] == {
        "model": "fake",
        "input_tokens": 1_024,
        "method": "snapkv",
        "finish_reason": "length",
        "snapshot": "off",
    }
    assert segment["metadata"] == {
        "default": {
            "kv_cache": {
                "original_entries": 1_024,
                "compressed_entries": 512.0,
                "compression_ratio": 2.0,
            }
        }
    }
    assert segment["http"] == {
        "request": {"method": "POST", "url": "/generate"},
        "response": {"status": 200},
    }
    parts = parts_of(segment)
    assert {name: ms_of(part) for name, part in parts.items()} == {
        "queue": 1.0,
        "prefill": 20.0,
        "decode": 30.0,
    }
    assert parts["queue"]["end_time"] == pytest.approx(parts["prefill"]["start_time"])
    assert parts["prefill"]["end_time"] == pytest.approx(parts["decode"]["start_time"])
    (compress,) = parts["prefill"]["subsegments"]
    assert (compress["name"], ms_of(compress)) == ("compress", 0.5)
    assert compress["end_time"] == parts["prefill"]["end_time"]
    assert compress["parent_id"] == parts["prefill"]["id"]
    assert {part["parent_id"] for part in parts.values()} == {segment["id"]}
    assert not segment["in_progress"]
    assert flags_of(segment) == set()


async def test_callers_trace_goes_on_and_is_returned(daemon: XRayDaemon, log: io.StringIO) -> None:
    async with fake_service(FakeEngine(), **traced(daemon, trace_sampling_rate=0.0)) as client:
        headers = {"X-Amzn-Trace-Id": f"Root={TRACE};Parent={PARENT};Sampled=1"}
        answer = await client.post("/generate", json={"prompt": "a"}, headers=headers)
    segment = await daemon.segment()
    assert (segment["trace_id"], segment["parent_id"]) == (TRACE, PARENT)
    assert answer.headers["X-Amzn-Trace-Id"] == f"Root={TRACE};Sampled=1"
    for event in ("inference_complete", "http_request"):
        (line,) = [x for x in lines_of(log) if x["event"] == event and x.get("trace_id")]
        assert line["trace_id"] == TRACE


async def test_caller_that_declines_is_not_traced(daemon: XRayDaemon, log: io.StringIO) -> None:
    """Its header comes back all the same; its log lines name no trace that nobody finds."""
    async with fake_service(FakeEngine(), **traced(daemon)) as client:
        headers = {"X-Amzn-Trace-Id": f"Root={TRACE};Sampled=0"}
        declined = await client.post("/generate", json={"prompt": "a"}, headers=headers)
        traced_answer = await client.post("/generate", json={"prompt": "a b"})
    segment = await daemon.segment()
    assert segment["annotations"]["input_tokens"] == 2
    assert declined.headers["X-Amzn-Trace-Id"] == f"Root={TRACE};Sampled=0"
    assert traced_answer.headers["X-Amzn-Trace-Id"] == f"Root={segment['trace_id']};Sampled=1"
    assert {line.get("trace_id") for line in lines_of(log)} == {None, segment["trace_id"]}


async def test_malformed_header_starts_a_trace_of_its_own(daemon: XRayDaemon) -> None:
    """What a caller makes up reaches neither the segment nor the answer."""
    async with fake_service(FakeEngine(), **traced(daemon)) as client:
        headers = {"X-Amzn-Trace-Id": f"Root={SECRET};Parent={SECRET};Self={SECRET}"}
        answer = await client.post("/generate", json={"prompt": "a"}, headers=headers)
    segment = await daemon.segment()
    assert answer.headers["X-Amzn-Trace-Id"] == f"Root={segment['trace_id']};Sampled=1"
    assert "parent_id" not in segment
    assert SECRET not in json.dumps(segment)


async def test_sampling_keeps_its_reservoir(daemon: XRayDaemon) -> None:
    """With a share of nothing, one request each second is traced."""
    settings = traced(daemon, trace_sampling_rate=0.0, trace_reservoir_per_s=1)
    async with fake_service(FakeEngine(), **settings) as client:
        answers = [await client.post("/generate", json={"prompt": "a"}) for _ in range(20)]
    num_traced = sum("X-Amzn-Trace-Id" in answer.headers for answer in answers)
    assert 1 <= num_traced < 20
    await daemon.segments(num_traced)


@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
@pytest.mark.usefixtures("log")
async def test_failures_are_marked(daemon: XRayDaemon, stream: bool) -> None:
    """4xx is an error, 429 a throttle as well, 5xx a fault; also in a stream with status 200."""
    engine = FakeEngine()
    async with fake_service(engine, **traced(daemon)) as client:

        async def status_of(**body: object) -> int:
            fields = {"prompt": "a b", "stream": stream, **body}
            return (await client.post("/generate", json=fields)).status_code

        assert await status_of(n=0) == 422
        engine.behaviour.queue_full = True
        assert await status_of() == 429
        engine.behaviour.queue_full = False
        engine.behaviour.crash_on_submit = True
        assert await status_of() == 500
        engine.behaviour.crash_on_submit = False
        engine.behaviour.fail_after = 1
        failed_status = await status_of()
    invalid, throttled, crashed, failed = await daemon.segments(4)
    assert (invalid["http"]["response"]["status"], flags_of(invalid)) == (422, {"error"})
    assert flags_of(throttled) == {"error", "throttle"}
    assert flags_of(crashed) == {"fault"}
    assert failed_status == (200 if stream else 500)
    assert failed["http"]["response"]["status"] == failed_status
    assert flags_of(failed) == {"fault"}
    assert failed["annotations"]["finish_reason"] == "error"
    assert "metadata" not in failed
    assert all("annotations" not in segment for segment in (invalid, throttled, crashed))


@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
async def test_request_out_of_time_is_a_fault(daemon: XRayDaemon, stream: bool) -> None:
    engine = FakeEngine()
    engine.behaviour.stall_after = 1
    async with fake_service(engine, **traced(daemon)) as client:
        headers = {"X-Request-Timeout": "0.05"}
        body = {"prompt": "a b", "stream": stream}
        await client.post("/generate", json=body, headers=headers)
    segment = await daemon.segment()
    assert flags_of(segment) == {"fault"}
    assert segment["annotations"]["finish_reason"] == "deadline"


@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
async def test_client_that_leaves_closes_its_trace(daemon: XRayDaemon, stream: bool) -> None:
    """Over a real socket; what is known of the request is in it."""
    engine = FakeEngine()
    engine.behaviour.stall_after = 1
    app = create_app(settings_for_tests(**traced(daemon)), engine)
    async with listening(app) as url:
        async with httpx.AsyncClient(base_url=url) as client:
            body = {"prompt": "a b c", "stream": stream}
            sending = asyncio.create_task(client.post("/generate", json=body))
            await until(lambda: engine.num_running == 1)
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        segment = await daemon.segment()
    assert flags_of(segment) == {"error"}
    assert segment["annotations"]["input_tokens"] == 3
    assert segment["annotations"]["finish_reason"] == "abort"
    assert parts_of(segment) == {}
    assert segment["end_time"] >= segment["start_time"]


async def test_probes_are_not_traced_and_nothing_secret_is(daemon: XRayDaemon) -> None:
    """A segment names a route, never a path, a query, a header or any text of a request."""
    async with fake_service(FakeEngine(), **traced(daemon)) as client:
        for path in ("/health/live", "/health/ready", "/metrics"):
            answer = await client.get(path, headers={"X-Amzn-Trace-Id": f"Root={TRACE};Sampled=1"})
            assert "X-Amzn-Trace-Id" not in answer.headers
        await client.post(
            f"/generate?key={SECRET}",
            json={"prompt": SECRET},
            headers={"Authorization": f"Bearer {SECRET}", "User-Agent": SECRET},
        )
        await client.get(f"/{SECRET}")
        await client.request(SECRET.upper(), "/generate", content=SECRET)
        await client.get(f"/v1/models/{SECRET}")
    segments = await daemon.segments(4)
    assert segments[0]["http"]["request"]["url"] == "/generate"
    assert segments[1]["http"]["request"]["url"] == "unmatched"
    assert segments[2]["http"]["request"]["method"] == "OTHER"
    assert SECRET not in json.dumps(segments).lower()


async def test_apps_of_one_process_keep_their_traces_apart() -> None:
    with XRayDaemon() as one, XRayDaemon() as other:
        async with (
            fake_service(FakeEngine(), **traced(one, service_name="one")) as first,
            fake_service(FakeEngine(), **traced(other, service_name="other")) as second,
            fake_service(FakeEngine()) as third,
        ):
            for client in (first, second, third, first):
                await client.post("/generate", json={"prompt": "a"})
        assert [segment["name"] for segment in await one.segments(2)] == ["one", "one"]
        assert [segment["name"] for segment in await other.segments(1)] == ["other"]


async def test_absent_daemon_has_no_effect_but_one_line(log: io.StringIO) -> None:
    """Nobody listens: answers are what they are without tracing, and losses are counted."""
    async with fake_service(FakeEngine(), **traced(free_udp_address())) as client:
        answers = [await client.post("/generate", json={"prompt": "a b"}) for _ in range(5)]
        async with asyncio.timeout(10):
            lost_metric = ""
            while lost_metric != "snapkv_traces_lost_total 4.0":  # a thread of its own sends
                text = (await client.get("/metrics")).text
                lost_metric = re.findall("^snapkv_traces_lost_total.*", text, re.MULTILINE)[0]
    async with fake_service(FakeEngine()) as client:
        expected = (await client.post("/generate", json={"prompt": "a b"})).json()
    for answer in answers:
        assert answer.status_code == 200
        assert {**answer.json(), "id": expected["id"]} == expected
    lost = [line for line in lines_of(log) if line["event"] == "traces_lost"]
    # The system tells of a datagram that nobody took when the next one is sent.
    assert sum(line["num_lost"] for line in lost) == 4
    assert len(lost) == 2
    assert {line["reason"] for line in lost} == {"ConnectionRefusedError"}


async def test_slow_name_of_a_daemon_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch, log: io.StringIO
) -> None:
    """The resolver hangs, then fails: answers come meanwhile, and a full queue is a loss."""
    may_fail = threading.Event()

    def hang(*args: object, **keywords: object) -> object:
        del args, keywords  # no host is looked for
        may_fail.wait(10)
        raise OSError(f"no such host as {SECRET}")

    monkeypatch.setattr(xray_sender, "MAX_QUEUED", 3)
    monkeypatch.setattr("socket.getaddrinfo", hang)
    async with fake_service(FakeEngine(), **traced("xray.example:2000")) as client:
        for _ in range(10):
            assert (await client.post("/generate", json={"prompt": "a"})).status_code == 200
        may_fail.set()
    lost = [line for line in lines_of(log) if line["event"] == "traces_lost"]
    assert sum(line["num_lost"] for line in lost) == 10
    assert {line["reason"] for line in lost} <= {"queue_full", "OSError"}
    assert SECRET not in log.getvalue()


@pytest.mark.parametrize("max_queued", [2, 2_048], ids=["full", "roomy"])
async def test_shutdown_does_not_wait_for_a_hanging_resolver(
    monkeypatch: pytest.MonkeyPatch, log: io.StringIO, max_queued: int
) -> None:
    """What is still queued then is lost, and said to be."""
    may_fail = threading.Event()

    def hang(*args: object, **keywords: object) -> object:
        del args, keywords  # no host is looked for
        may_fail.wait(10)
        raise OSError

    monkeypatch.setattr(xray_sender, "MAX_QUEUED", max_queued)
    monkeypatch.setattr(xray_sender, "CLOSE_TIMEOUT_S", 0.1)
    monkeypatch.setattr("socket.getaddrinfo", hang)
    try:
        async with asyncio.timeout(5):
            async with fake_service(FakeEngine(), **traced("xray.example:2000")) as client:
                for _ in range(5):
                    await client.post("/generate", json={"prompt": "a"})
        lost = [line for line in lines_of(log) if line["event"] == "traces_lost"]
        assert sum(line["num_lost"] for line in lost) == 5
        assert lost[-1]["reason"] == "not_sent_at_close"
    finally:
        may_fail.set()


async def test_address_from_lambda_wins(
    daemon: XRayDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lambda names its daemon in the environment; so do others that run one beside a service."""
    monkeypatch.setenv("AWS_XRAY_DAEMON_ADDRESS", daemon.address)
    async with fake_service(FakeEngine(), **traced(free_udp_address())) as client:
        await client.post("/generate", json={"prompt": "a"})
    await daemon.segment()


@pytest.mark.parametrize("address", ["127.0.0.1:0", "127.0.0.1:65536"])
def test_address_without_a_port_is_refused_at_the_start(address: str) -> None:
    with pytest.raises(SettingsError, match="SNAPKV_XRAY_DAEMON_ADDRESS"):
        create_app(settings_for_tests(**traced(address)), FakeEngine())


@pytest.mark.parametrize("step", ["begin", "end"])
async def test_tracer_that_breaks_costs_no_answer(
    daemon: XRayDaemon, log: io.StringIO, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """A bug in tracing, or a surprise of the SDK, is a log line."""

    def broken(*args: object, **keywords: object) -> object:
        del args, keywords  # whatever it is asked
        raise RuntimeError(SECRET)

    target = {"begin": "XRayExporter.open", "end": "XRayTrace.end"}[step]
    monkeypatch.setattr(f"app.telemetry.tracing.xray.{target}", broken)
    async with fake_service(FakeEngine(), **traced(daemon)) as client:
        answer = await client.post("/generate", json={"prompt": "a"})
    assert answer.status_code == 200
    (line,) = [line for line in lines_of(log) if line["event"] == "trace_failed"]
    assert (line["step"], line["error_type"]) == (step, "RuntimeError")
    assert line["request_id"] == answer.headers["X-Request-Id"]
    assert SECRET not in log.getvalue()
    assert daemon.documents() == []
