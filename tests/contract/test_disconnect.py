"""Over a real socket: a client that goes away, a body that is too large, a server that stops."""

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest

from app.main import create_app
from tests.support.app_client import listening, settings_for_tests, until
from tests.support.fake_engine import FakeEngine


@pytest.fixture
def engine() -> FakeEngine:
    """Return a fake engine."""
    return FakeEngine()


@pytest.fixture
async def url(engine: FakeEngine) -> AsyncIterator[str]:
    """Serve the fake engine on a port."""
    async with listening(create_app(settings_for_tests(max_body_bytes=100_000), engine)) as url:
        yield url


async def post_raw(
    url: str, body: dict[str, object]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request by hand, so that the test owns the connection."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    payload = json.dumps(body).encode()
    head = (
        f"POST /generate HTTP/1.1\r\nHost: {host}\r\nX-Request-Id: leaving\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    writer.write(head.encode() + payload)
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("stall_after", [0, 1], ids=["before-first-token", "in-the-middle"])
@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
async def test_client_that_leaves_aborts_its_request(
    engine: FakeEngine, url: str, stream: bool, stall_after: int
) -> None:
    """Its sequence is aborted, the log counts it, and others are served."""
    engine.behaviour.stall_after = stall_after
    reader, writer = await post_raw(url, {"prompt": "a b c", "stream": stream})
    await until(lambda: engine.num_running == 1)
    if stream and stall_after:
        await reader.readuntil(b"data: ")
    writer.close()
    await writer.wait_closed()
    await until(lambda: engine.aborted == ["leaving"])
    assert engine.num_running == 0
    engine.behaviour.stall_after = None
    async with httpx.AsyncClient(base_url=url) as client:
        assert (await client.post("/generate", json={"prompt": "a"})).status_code == 200
        metrics = (await client.get("/metrics")).text
    assert 'snapkv_requests_total{outcome="aborted",route="/generate"} 1.0' in metrics


async def test_client_that_reads_to_the_end_aborts_nothing(engine: FakeEngine, url: str) -> None:
    """Pieces arrive one by one, and a finished request is not aborted."""
    engine.behaviour.delay_s = 0.01
    async with (
        httpx.AsyncClient(base_url=url) as client,
        client.stream("POST", "/generate", json={"prompt": "a b", "stream": True}) as answer,
    ):
        chunks = [chunk async for chunk in answer.aiter_text()]
    assert len(chunks) > 2
    assert chunks[-1].endswith("data: [DONE]\n\n")
    assert engine.aborted == []


async def test_equal_request_ids_do_not_collide(engine: FakeEngine, url: str) -> None:
    """Two running requests with one X-Request-Id are two requests for the engine."""
    engine.behaviour.stall_after = 0
    writers = [(await post_raw(url, {"prompt": "a"}))[1] for _ in range(2)]
    await until(lambda: engine.num_running == 2)
    assert len({request.request_id for request in engine.requests}) == 2
    for writer in writers:
        writer.close()
        await writer.wait_closed()
    await until(lambda: engine.num_running == 0)


async def test_oversized_body_is_refused_while_it_arrives(url: str) -> None:
    """The client reads its 413, and the server serves the next request."""
    async with httpx.AsyncClient(base_url=url) as client:
        for _ in range(3):
            answer = await client.post("/generate", json={"prompt": "x" * 5_000_000})
            assert answer.status_code == 413
            assert answer.headers["connection"] == "close"
        assert (await client.post("/generate", json={"prompt": "a"})).status_code == 200


async def test_server_that_stops_aborts_what_hangs(engine: FakeEngine) -> None:
    """A stream that never ends does not keep the engine from being stopped."""
    engine.behaviour.stall_after = 0
    app = create_app(settings_for_tests(), engine)
    async with listening(app, shutdown_timeout_s=1) as url:
        _, writer = await post_raw(url, {"prompt": "a", "stream": True})
        await until(lambda: engine.num_running == 1)
    await until(lambda: engine.aborted == ["leaving"])
    assert not engine.is_alive
    writer.close()
    await writer.wait_closed()
