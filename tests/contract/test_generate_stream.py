"""`POST /generate` with streaming: the events, and what happens when either side fails."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from app.api.sse import HEARTBEAT_FRAME, with_heartbeats
from tests.support.fake_engine import FakeEngine


def events_of(answer: httpx.Response) -> list[Any]:
    """Parse a stream: every frame is one `data:` line and a blank one."""
    frames = answer.text.split("\n\n")
    assert frames.pop() == ""
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    payloads = [frame.removeprefix("data: ") for frame in frames]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


async def test_stream_says_what_the_json_answer_says(client: httpx.AsyncClient) -> None:
    """Joined pieces are the text; the last event carries everything else."""
    body = {"prompt": "one two  三 \u2028 é", "max_new_tokens": 9, "explain": True}
    answer = await client.post("/generate", json={**body, "stream": True})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-accel-buffering"] == "no"
    *pieces, last, done = events_of(answer)
    plain = (await client.post("/generate", json=body)).json()
    assert done == "[DONE]"
    assert all(set(piece) == {"id", "text"} for piece in pieces)
    assert "".join(piece["text"] for piece in pieces) == plain["text"]
    assert last.pop("text") == ""
    assert {event["id"] for event in [*pieces, last]} == {answer.headers["x-request-id"]}
    del plain["text"], plain["id"], last["id"]
    assert last == plain


async def test_choices_of_a_stream_are_told_apart(client: httpx.AsyncClient) -> None:
    """With n above 1 each piece has its index, and each choice its own end."""
    body = {"prompt": "a b", "n": 3}
    *pieces, last, _ = events_of(await client.post("/generate", json={**body, "stream": True}))
    plain = (await client.post("/generate", json=body)).json()
    for choice in plain["choices"]:
        mine = [piece for piece in pieces if piece["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in mine) == choice["text"]
        assert [piece.get("finish_reason") for piece in mine] == [None, choice["finish_reason"]]
    assert last["choices"] == [{"index": index, "finish_reason": "stop"} for index in range(3)]


@pytest.mark.parametrize(
    ("behaviour", "code"), [("fail_after", "generation_failed"), ("abort_after", "engine_stopped")]
)
async def test_failure_in_mid_stream_is_an_error_event(
    client: httpx.AsyncClient, engine: FakeEngine, behaviour: str, code: str
) -> None:
    """The client gets the pieces so far, then an error, and no [DONE]."""
    setattr(engine.behaviour, behaviour, 1)
    answer = await client.post("/generate", json={"prompt": "a b", "stream": True})
    piece, failure = events_of(answer)
    assert answer.status_code == 200
    assert piece["text"] == " a"
    assert failure["id"] == piece["id"]
    assert failure["error"]["code"] == code
    metrics = (await client.get("/metrics")).text
    assert 'snapkv_requests_total{outcome="error",route="/generate"} 1.0' in metrics


async def test_refusal_before_the_stream_is_plain_json(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    """A stream that never began has the status of its error."""
    answer = await client.post("/generate", json={"prompt": "a", "stream": True, "n": 0})
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["error"]["param"] == "n"
    assert engine.requests == []


async def test_silence_is_filled_with_comments() -> None:
    """A long prefill sends comments, which keep proxies from closing the connection."""
    may_go = asyncio.Event()

    async def frames() -> AsyncIterator[str]:
        yield "first"
        await may_go.wait()
        yield "second"

    seen = []
    async for frame in with_heartbeats(frames(), 0.01):
        seen.append(frame)
        if seen.count(HEARTBEAT_FRAME) == 2:
            may_go.set()
    assert [frame for frame in seen if frame != HEARTBEAT_FRAME] == ["first", "second"]
    assert seen[1] == HEARTBEAT_FRAME
    assert seen[-1] == "second"
