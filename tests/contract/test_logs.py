"""The log lines that other systems read, and that no text of a request is in any of them."""

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import structlog

from app.main import create_app
from tests.support.app_client import fake_service, listening, settings_for_tests
from tests.support.fake_engine import FakeEngine
from tests.support.logs import captured_log
from tests.support.xray_daemon import free_udp_address

SECRET = "tangerine"


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """Capture every log line of the process at the lowest level."""
    with captured_log() as stream:
        yield stream


def lines_of(log: io.StringIO) -> list[dict[str, Any]]:
    """Parse the log: each line is one JSON object."""
    return [json.loads(line) for line in log.getvalue().splitlines()]


def events_of(log: io.StringIO, name: str) -> list[dict[str, Any]]:
    """Return the fields of one kind of event, without those that every line has."""
    common = {"timestamp", "level", "logger", "event"}
    return [
        {key: value for key, value in line.items() if key not in common}
        for line in lines_of(log)
        if line["event"] == name
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_finished_request_logs_exactly_the_contract(log: io.StringIO, stream: bool) -> None:
    """Names and number of fields are fixed; dashboards and alarms read them."""
    async with fake_service(FakeEngine()) as client:
        body = {"prompt": "w " * 1_024, "max_new_tokens": 3, "stream": stream}
        await client.post("/generate", json=body, headers={"X-Request-Id": "r-1"})
    assert events_of(log, "inference_complete") == [
        {
            "request_id": "r-1",
            "model": "fake",
            "input_tokens": 1_024,
            "output_tokens": 3,
            "duration_ms": 51.0,
            "time_to_first_token_ms": 21.0,
            "queue_ms": 1.0,
            "finish_reason": "length",
        }
    ]
    assert events_of(log, "kv_cache_compressed") == [
        {
            "request_id": "r-1",
            "method": "snapkv",
            "kv_original_size": 1_024,
            "kv_compressed_size": 512.0,
            "kv_original_bytes": 65_536,
            "kv_compressed_bytes": 32_768,
            "compression_ratio": 2.0,
            "kept_attention_mass": 0.9,
        }
    ]
    (request,) = [line for line in events_of(log, "http_request") if line["route"] == "/generate"]
    assert (request["request_id"], request["status"], request["outcome"]) == (
        "r-1",
        200,
        "success",
    )


async def test_ready_engine_says_what_it_holds(log: io.StringIO) -> None:
    """The size of the KV cache, and how many requests without any wishes fit at once."""
    async with fake_service(FakeEngine()):
        pass
    (ready,) = events_of(log, "engine_ready")
    assert 0 <= ready.pop("load_ms") < 5_000
    assert ready == {
        "model": "fake",
        "max_model_len": 2_048,
        "device": "cpu",
        "dtype": "float32",
        "attention_backend": "echo",
        "page_size": 16,
        "num_pages": 400,
        "kv_pool_bytes": 102_400,
        "num_cache_tokens": 1_600,
        # 1,600 tokens over the demo model's 512 kept and the default answer's 256.
        "num_default_sequences": 2,
    }


async def test_nothing_compressed_is_not_logged_as_compressed(log: io.StringIO) -> None:
    """A prompt that fits has no compression event."""
    async with fake_service(FakeEngine()) as client:
        await client.post("/generate", json={"prompt": "short"})
    assert events_of(log, "kv_cache_compressed") == []
    assert len(events_of(log, "inference_complete")) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_failed_request_is_logged_as_error(log: io.StringIO, stream: bool) -> None:
    """A failure has its own event, and the request's line says error."""
    engine = FakeEngine()
    engine.behaviour.fail_after = 0
    async with fake_service(engine) as client:
        await client.post("/generate", json={"prompt": "a", "stream": stream})
    (failed,) = events_of(log, "generation_failed")
    assert failed["error"] == "the fake was told to fail"
    (complete,) = events_of(log, "inference_complete")
    assert complete["finish_reason"] == "error"
    assert complete["time_to_first_token_ms"] is None


async def test_no_text_of_a_request_is_ever_logged(log: io.StringIO) -> None:
    """Over a real server at debug level, through success, refusal, failure and crash."""
    engine = FakeEngine()
    async with (
        listening(create_app(settings_for_tests(), engine)) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        for body in (
            {"prompt": SECRET},
            {"prompt": SECRET, "stream": True},
            {"messages": [{"role": "user", "content": SECRET}]},
            {"prompt": SECRET, "n": SECRET},
            {"prompt": SECRET, SECRET: 1},
            {"prompt": f"{SECRET} " * 3_000},
            {"prompt": "a", "stop": [SECRET, ""]},
        ):
            await client.post("/generate", json=body)
        for body in (
            {"model": "fake", "prompt": SECRET},
            {"model": "fake", "prompt": SECRET, "stream": True},
            {"model": SECRET, "prompt": SECRET},
            {"model": "fake", "prompt": SECRET, "suffix": SECRET},
            {"model": "fake", "prompt": SECRET, "user": SECRET},
        ):
            await client.post("/v1/completions", json=body)
        await client.get(f"/v1/models/{SECRET}")
        engine.behaviour.crash_on_submit = True
        crashed = await client.post("/generate", json={"prompt": SECRET})
        assert crashed.status_code == 500
        await client.get("/generate", params={"prompt": SECRET})
        await client.get(f"/{SECRET}", headers={"X-Request-Id": f"{SECRET} x"})
        await client.post("/generate", content=f'{{"prompt": "{SECRET}'.encode())
    lines = lines_of(log)
    ours = [line for line in lines if not line["logger"].startswith(("httpx", "httpcore"))]
    assert SECRET not in json.dumps(ours)
    (crash,) = [line for line in ours if line["event"] == "unhandled_error"]
    assert crash["error_type"] == "RuntimeError"
    assert any("fake_engine.py" in frame for frame in crash["stack"])
    assert any(line["logger"] == "uvicorn.error" for line in ours)


async def test_lines_of_other_libraries_have_the_same_shape(log: io.StringIO) -> None:
    """One parser reads everything, exceptions included; their messages are left out."""
    try:
        raise ValueError(SECRET)
    except ValueError:
        logging.getLogger("some.library").exception("it %s", "broke")
    (line,) = [line for line in lines_of(log) if line["logger"] == "some.library"]
    assert (line["event"], line["logger"], line["level"]) == ("it broke", "some.library", "error")
    assert line["error_type"] == "ValueError"
    assert SECRET not in log.getvalue()


@pytest.mark.parametrize("stream", [False, True])
async def test_every_line_of_a_request_names_it_and_its_trace(
    log: io.StringIO, stream: bool
) -> None:
    """Whatever is written while requests are answered, lines of metrics included."""
    trace_id = "1-5759e988-bd862e3fe1be46a994272793"
    headers = {
        "X-Request-Id": "r-1",
        "X-Amzn-Trace-Id": f"Root={trace_id};Sampled=1",
    }
    settings = {"tracing": "xray", "xray_daemon_address": free_udp_address()}
    async with fake_service(FakeEngine(), **settings) as client:
        num_before = len(lines_of(log))
        body = {"prompt": "w " * 1_024, "stream": stream}
        await client.post("/generate", json=body, headers=headers)
        await client.post("/generate", json={}, headers=headers)
        written = lines_of(log)[num_before:]
    # Metrics of the engine come by the clock and belong to no request; nobody takes the traces.
    of_nobody = {"engine_metrics", "traces_lost"}
    ours = [
        line
        for line in written
        if line["logger"].startswith("snapkv.") and line["event"] not in of_nobody
    ]
    assert sorted(line["event"] for line in ours) == [
        "generation_metrics",
        "http_request",
        "http_request",
        "inference_complete",
        "kv_cache_compressed",
    ]
    assert [(line.get("request_id"), line.get("trace_id")) for line in ours] == [
        ("r-1", trace_id)
    ] * 5


async def test_refused_request_logs_the_code_of_its_error(log: io.StringIO) -> None:
    """Errors can be counted by what they are, not only by their status."""
    async with fake_service(FakeEngine()) as client:
        await client.post("/generate", json={"prompt": ""})
        await client.post("/generate", json={"prompt": "a"})
    requests = [line for line in events_of(log, "http_request") if line["route"] == "/generate"]
    assert [line["error_code"] for line in requests] == ["invalid_value", None]


def test_line_of_another_library_names_the_request_it_belongs_to(log: io.StringIO) -> None:
    """Libraries know nothing of requests; the context does."""
    with structlog.contextvars.bound_contextvars(request_id="r-1", trace_id="1-5-a"):
        logging.getLogger("some.library").warning("hello")
    (line,) = lines_of(log)
    assert (line["request_id"], line["trace_id"]) == ("r-1", "1-5-a")
