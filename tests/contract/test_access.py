"""Keys over HTTP: who is let in, what is left open, and that no key is ever shown."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from app.main import create_app
from app.services.access import namespace_of
from tests.contract.test_generate_errors import check_shape
from tests.support.app_client import fake_service, listening, settings_for_tests
from tests.support.fake_engine import FakeEngine
from tests.support.logs import captured_log

KEY, OTHER, WRONG = "key-of-team-a-0123", "key-of-team-b-4567", "key-of-nobody-8901"
KEYS = {"team.a": KEY, "team-b": OTHER}
BODY = {"prompt": "a b", "max_new_tokens": 2}
PRIVATE = [
    ("POST", "/generate"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/fake"),
    ("GET", "/playground.json"),
    ("GET", "/playground"),
    ("GET", "/no-such-path"),
    ("GET", "/health/live/"),
    ("GET", "/METRICS"),
]
PUBLIC = [
    "/",
    "/playground/main.js",
    "/health/live",
    "/health/ready",
    "/metrics",
    "/docs",
    "/openapi.json",
]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
async def guarded(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    """Serve with keys."""
    async with fake_service(engine, api_keys=KEYS) as client:
        yield client


@pytest.mark.parametrize(("method", "path"), PRIVATE)
async def test_without_a_known_key_nothing_is_answered(
    guarded: httpx.AsyncClient, engine: FakeEngine, method: str, path: str
) -> None:
    """Missing and wrong look the same, down to the bytes."""
    headers = [{}, bearer(WRONG), {"Authorization": KEY}, {"Authorization": f"Basic {KEY}"}]
    answers = [await guarded.request(method, path, json=BODY, headers=given) for given in headers]
    assert {answer.status_code for answer in answers} == {401}
    assert len({answer.content for answer in answers}) == 1
    error = check_shape(answers[0])
    assert (error["type"], error["code"]) == ("authentication_error", "unauthorized")
    assert answers[0].headers["WWW-Authenticate"] == "Bearer"
    assert engine.requests == []


@pytest.mark.parametrize("path", PUBLIC)
async def test_probes_metrics_and_the_description_are_open(
    guarded: httpx.AsyncClient, path: str
) -> None:
    answer = await guarded.get(path)
    assert answer.status_code == 200
    assert not any(key in answer.text for key in (KEY, OTHER))


async def test_callers_share_no_snapshots(guarded: httpx.AsyncClient, engine: FakeEngine) -> None:
    for key in (KEY, OTHER):
        assert (await guarded.post("/generate", json=BODY, headers=bearer(key))).status_code == 200
    namespaces = [request.snapshot_namespace for request in engine.requests]
    assert namespaces == [namespace_of("team.a"), namespace_of("team-b")]
    assert len({*namespaces, "default"}) == 3


async def test_openais_client_sends_its_key(engine: FakeEngine) -> None:
    app = create_app(settings_for_tests(api_keys=KEYS), engine)
    async with listening(app) as url:
        async with openai.AsyncOpenAI(api_key=KEY, base_url=f"{url}/v1", max_retries=0) as client:
            assert [model.id for model in (await client.models.list()).data] == ["fake"]
            answer = await client.completions.create(model="fake", prompt="a b", max_tokens=1)
            assert answer.choices[0].text == " a"
        async with openai.AsyncOpenAI(api_key=WRONG, base_url=f"{url}/v1", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError) as caught:
                await client.models.list()
    assert caught.value.code == "unauthorized"


async def test_a_refused_body_is_not_read(guarded: httpx.AsyncClient) -> None:
    """Neither its size nor its form matters to somebody who may not send it."""
    for content in (b"x" * 20_000_000, b"{not json", b"\xff"):
        answer = await guarded.post("/generate", content=content)
        assert answer.status_code == 401


async def test_no_key_is_shown_anywhere(engine: FakeEngine) -> None:
    with captured_log() as log:
        async with fake_service(engine, api_keys=KEYS) as client:
            pages: list[Any] = [
                await client.post("/generate", json=BODY, headers=bearer(KEY)),
                await client.post("/generate", json={**BODY, "x": KEY}, headers=bearer(WRONG)),
                await client.post("/generate", json={"prompt": 1}, headers=bearer(KEY)),
                *[await client.get(path) for path in PUBLIC],
            ]
    shown = log.getvalue() + "".join(page.text + json.dumps(dict(page.headers)) for page in pages)
    for key in (KEY, OTHER, WRONG):
        assert key not in shown
    assert '"caller": "team.a"' in log.getvalue()


async def test_switched_off_nobody_is_asked(engine: FakeEngine) -> None:
    async with fake_service(engine, api_keys=KEYS, auth="off") as client:
        assert (await client.post("/generate", json=BODY)).status_code == 200
    assert engine.requests[0].snapshot_namespace == "default"


async def test_refusals_are_counted(guarded: httpx.AsyncClient) -> None:
    await guarded.post("/generate", json=BODY)
    found = (await guarded.get("/metrics")).text
    assert 'snapkv_request_errors_total{reason="unauthorized"} 1.0' in found
    assert 'snapkv_requests_total{outcome="invalid",route="unmatched"} 1.0' in found
