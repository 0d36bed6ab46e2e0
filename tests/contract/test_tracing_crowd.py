"""Two hundred streams at once under uvicorn with uvloop: every trace whole, and nobody else's."""

import asyncio
import gc
import io
import json
import logging
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import uvloop

from app.main import create_app
from app.telemetry.tracing.xray_context import RequestSegment
from tests.support.app_client import listening, settings_for_tests, until
from tests.support.fake_engine import FakeEngine, FakeStream
from tests.support.logs import captured_log
from tests.support.otlp_collector import OtlpCollector
from tests.support.xray_daemon import XRayDaemon

NUM_STREAMS = 200
#: Prompts differ in length, so that a mixed-up trace shows.
PROMPT_TOKENS = [2 + number for number in range(NUM_STREAMS)]
NUM_OUTPUT = 20

#: Whoever logs when a service starts and stops, and has no request to name.
OF_REQUESTS = {"requests", "metrics", "http"}
START_AND_STOP = {"uvicorn.error", "snapkv.engine", "aws_xray_sdk.core.patcher"}

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Answer:
    """What a client saw of its request."""

    request_id: str
    trace_id: str
    num_prompt_tokens: int


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """Capture the log."""
    with captured_log("info") as stream:
        # The clients of this test live in the same process.
        logging.getLogger("httpx").setLevel(logging.WARNING)
        yield stream
        logging.getLogger("httpx").setLevel(logging.NOTSET)


def crowd(monkeypatch: pytest.MonkeyPatch, **settings: object) -> list[Answer]:
    """Serve all streams at once; none gets its first token before all are running."""

    async def serve() -> list[Answer]:
        assert isinstance(asyncio.get_running_loop(), uvloop.Loop)
        engine = FakeEngine()
        all_run = asyncio.Event()

        async def wait(stream: FakeStream) -> None:
            del stream  # all wait for the same
            await all_run.wait()
            await asyncio.sleep(0)

        monkeypatch.setattr(FakeStream, "_wait", wait)
        app = create_app(settings_for_tests(trace_sampling_rate=1.0, **settings), engine)
        limits = httpx.Limits(max_connections=NUM_STREAMS)
        async with (
            listening(app) as url,
            httpx.AsyncClient(base_url=url, limits=limits, timeout=60) as client,
        ):
            streams = [asyncio.create_task(read(client, num)) for num in PROMPT_TOKENS]
            await until(lambda: engine.num_running == NUM_STREAMS, 60)
            all_run.set()
            return await asyncio.gather(*streams)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve())


async def read(client: httpx.AsyncClient, num_prompt_tokens: int) -> Answer:
    """Read one stream to its end; half of the callers name a trace of their own."""
    named = f"Root=1-5759e988-{num_prompt_tokens:024x};Sampled=1"
    headers = {"X-Amzn-Trace-Id": named} if num_prompt_tokens % 2 else {}
    body = {"prompt": "w " * num_prompt_tokens, "max_new_tokens": NUM_OUTPUT, "stream": True}
    async with client.stream("POST", "/generate", json=body, headers=headers) as answer:
        text = (await answer.aread()).decode()
    assert text.endswith("data: [DONE]\n\n")
    returned = answer.headers["X-Amzn-Trace-Id"]
    if headers:
        assert returned == named
    root = returned.removeprefix("Root=").partition(";")[0]
    return Answer(answer.headers["X-Request-Id"], root, num_prompt_tokens)


def check_log(log: io.StringIO, trace_of: dict[str, str]) -> None:
    """Check that each line of a request names it and its trace, and that none is missing."""
    lines: list[dict[str, Any]] = [json.loads(line) for line in log.getvalue().splitlines()]
    of_engine = [line for line in lines if line["event"] == "engine_metrics"]
    lines = [line for line in lines if line not in of_engine]
    ours = [line for line in lines if line["logger"].removeprefix("snapkv.") in OF_REQUESTS]
    assert all(line.get("request_id") for line in ours)
    events: dict[str, list[str]] = defaultdict(list)
    for line in ours:
        if line["request_id"] in trace_of:
            assert line["trace_id"] == trace_of[line["request_id"]]
            events[line["event"]].append(line["request_id"])
    for event in ("inference_complete", "generation_metrics", "http_request"):
        assert sorted(events[event]) == sorted(trace_of)
    others = {line["logger"] for line in lines if "request_id" not in line}
    assert others <= START_AND_STOP, others


def test_crowd_in_xray(monkeypatch: pytest.MonkeyPatch, log: io.StringIO) -> None:
    with XRayDaemon() as daemon:
        answers = crowd(monkeypatch, tracing="xray", xray_daemon_address=daemon.address)
        segments = asyncio.run(daemon.segments(NUM_STREAMS))
    by_trace = {segment["trace_id"]: segment for segment in segments}
    assert len(by_trace) == NUM_STREAMS
    for answer in answers:
        segment = by_trace[answer.trace_id]
        assert segment["annotations"]["input_tokens"] == answer.num_prompt_tokens
        assert segment["http"]["response"]["status"] == 200
        assert not segment["in_progress"]
        parts = [part["name"] for part in segment["subsegments"]]
        assert parts == ["queue", "prefill", "decode"]
        assert {part["parent_id"] for part in segment["subsegments"]} == {segment["id"]}
    ids = [segment["id"] for segment in segments]
    assert len(set(ids)) == NUM_STREAMS
    check_log(log, {answer.request_id: answer.trace_id for answer in answers})
    gc.collect()
    held = [thing for thing in gc.get_objects() if type(thing) is RequestSegment]
    assert not by_trace.keys() & {segment.trace_id for segment in held}


def test_crowd_in_otlp(monkeypatch: pytest.MonkeyPatch, log: io.StringIO) -> None:
    with OtlpCollector() as collector:
        answers = crowd(monkeypatch, tracing="otlp", otlp_endpoint=collector.endpoint)
        spans = asyncio.run(collector.spans(5 * NUM_STREAMS))
    by_trace = defaultdict(list)
    for span in spans:
        by_trace[f"1-{span.trace_id[:8]}-{span.trace_id[8:]}"].append(span)
    assert len(by_trace) == NUM_STREAMS
    for answer in answers:
        trace = {span.name: span for span in by_trace[answer.trace_id]}
        request = trace.pop("POST /generate")
        assert request.attributes["input_tokens"] == answer.num_prompt_tokens
        assert sorted(trace) == ["compress", "decode", "prefill", "queue"]
        prefill = trace["prefill"].span_id
        assert {name: span.parent_id for name, span in trace.items()} == {
            "queue": request.span_id,
            "prefill": request.span_id,
            "compress": prefill,
            "decode": request.span_id,
        }
    trace_of = {answer.request_id: answer.trace_id for answer in answers}
    check_log(log, {name: root[2:].replace("-", "") for name, root in trace_of.items()})
