"""Requests whose time is up: the header, the status, and that the engine is free afterwards."""

import io
import json

import httpx
import pytest

from snapkv_core import EngineConfig
from tests.support.app_client import fake_service
from tests.support.fake_engine import FakeEngine
from tests.support.logs import captured_log

BAD_VALUES: list[bytes] = [
    *b"0|0.0|-1|+1||abc|nan|inf|1e3|1_0|1,5|.5|5.|0x1|1 2".split(b"|"),
    b"9" * 400,
    b"\xb2",
    b"\xd9\xa3",
]
PATHS = ("/generate", "/v1/completions")


def body_for(path: str, **fields: object) -> dict[str, object]:
    """Return a request that either route takes."""
    model = {"model": "fake"} if path.startswith("/v1") else {}
    return {"prompt": "a b c", **model, **fields}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("value", "seconds"),
    [("2.5", 2.5), ("1", 1.0), ("0.001", 0.001), ("007", 7.0), ("9" * 300, float("9" * 300))],
)
async def test_header_reaches_the_engine(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, value: str, seconds: float
) -> None:
    """Any finite decimal number of seconds is passed on; without the header nothing is."""
    engine.config = EngineConfig()
    headers = {"X-Request-Timeout": value}
    await client.post(path, json=body_for(path), headers=headers)
    await client.post(path, json=body_for(path))
    assert [request.timeout_s for request in engine.requests] == [seconds, None]


@pytest.mark.parametrize(("path", "status"), [("/generate", 422), ("/v1/completions", 400)])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("value", BAD_VALUES, ids=lambda value: repr(value)[:8])
async def test_bad_header_is_refused_by_its_name(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    path: str,
    status: int,
    stream: bool,
    value: bytes,
) -> None:
    """A limit that cannot be meant is never ignored."""
    headers = {b"X-Request-Timeout": value}
    answer = await client.post(path, json=body_for(path, stream=stream), headers=headers)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, "X-Request-Timeout")
    assert error["code"] == "invalid_value"
    assert "X-Request-Timeout: must be one decimal number of seconds" in error["message"]
    assert engine.requests == []


async def test_header_that_comes_twice_is_refused(client: httpx.AsyncClient) -> None:
    """Nobody knows which of the two was meant."""
    headers = [("X-Request-Timeout", "5"), ("X-Request-Timeout", "6")]
    answer = await client.post("/generate", json=body_for("/generate"), headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (422, "X-Request-Timeout")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stall_after", [0, 1], ids=["queued", "in-the-middle"])
async def test_late_answer_is_a_504(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, stall_after: int
) -> None:
    """Half an answer is no answer; the next request is served."""
    engine.behaviour.stall_after = stall_after
    headers = {"X-Request-Timeout": "0.05"}
    answer = await client.post(path, json=body_for(path), headers=headers)
    assert answer.status_code == 504
    assert answer.json() == {
        "error": {
            "type": "timeout_error",
            "code": "deadline_exceeded",
            "message": "the request's time was up before its answer was complete",
            "param": None,
        }
    }
    assert engine.num_running == 0
    engine.behaviour.stall_after = None
    assert (await client.post(path, json=body_for(path))).status_code == 200
    metrics = (await client.get("/metrics")).text
    assert f'snapkv_requests_total{{outcome="deadline",route="{path}"}} 1.0' in metrics


@pytest.mark.parametrize("path", PATHS)
async def test_late_stream_ends_with_an_error_event(
    client: httpx.AsyncClient, engine: FakeEngine, path: str
) -> None:
    """The pieces that came in time are followed by the error and by no [DONE]."""
    engine.behaviour.stall_after = 2
    headers = {"X-Request-Timeout": "0.05"}
    answer = await client.post(path, json=body_for(path, stream=True), headers=headers)
    assert answer.status_code == 200
    frames = answer.text.removesuffix("\n\n").split("\n\n")
    assert len(frames) == 3
    last = json.loads(frames[-1].removeprefix("data: "))
    assert last["error"]["code"] == "deadline_exceeded"
    metrics = (await client.get("/metrics")).text
    assert f'snapkv_requests_total{{outcome="deadline",route="{path}"}} 1.0' in metrics


async def test_header_can_only_shorten_the_servers_limit() -> None:
    """The server's own limit ends a request that allows itself more."""
    engine = FakeEngine(EngineConfig(request_timeout_s=0.05))
    engine.behaviour.stall_after = 0
    async with fake_service(engine) as client:
        for headers in ({}, {"X-Request-Timeout": "3600"}):
            answer = await client.post("/generate", json={"prompt": "a"}, headers=headers)
            assert answer.status_code == 504


@pytest.mark.parametrize("stream", [False, True])
async def test_late_request_is_logged_as_such(stream: bool) -> None:
    """The line about the request names the deadline, and no failure is reported."""
    engine = FakeEngine()
    engine.behaviour.stall_after = 1
    with captured_log() as log:
        async with fake_service(engine) as client:
            await client.post(
                "/generate",
                json={"prompt": "a b", "stream": stream},
                headers={"X-Request-Timeout": "0.05"},
            )
    lines = parse(log)
    (complete,) = [line for line in lines if line["event"] == "inference_complete"]
    assert complete["finish_reason"] == "deadline"
    (request,) = [line for line in lines if line.get("route") == "/generate"]
    assert request["outcome"] == "deadline"
    assert request["status"] == (200 if stream else 504)
    assert "generation_failed" not in {line["event"] for line in lines}


def parse(log: io.StringIO) -> list[dict[str, object]]:
    """Parse the log: each line is one JSON object."""
    return [json.loads(line) for line in log.getvalue().splitlines()]
