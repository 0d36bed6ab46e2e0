"""Rate limits over HTTP: what is told, what is refused, and that nothing stays charged."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from app.main import create_app
from app.services import rate_limits
from tests.contract.test_generate_errors import check_shape
from tests.support.app_client import fake_service, listening, settings_for_tests, until
from tests.support.fake_engine import FakeEngine
from tests.support.logs import captured_log

KEY, OTHER = "key-of-team-a-0123", "key-of-team-b-4567"
BODY = {"prompt": "a b c", "max_new_tokens": 5}  # answered with 3 tokens
LIMITS = {
    "default": {"requests_per_minute": 4, "tokens_per_minute": 40},
    "team-b": {"requests_per_minute": None, "tokens_per_minute": None},
}
LIMITS_OF_ALL = {"default": LIMITS["default"]}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def told(answer: httpx.Response) -> dict[str, str]:
    """Return the headers about limits."""
    prefix = "x-ratelimit-"
    return {k[len(prefix) :]: v for k, v in answer.headers.items() if k.startswith(prefix)}


def remaining(answer: httpx.Response) -> tuple[int, int]:
    """Return requests and tokens that are left."""
    headers = told(answer)
    return int(headers["remaining-requests"]), int(headers["remaining-tokens"])


@pytest.fixture
async def limited(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    """Serve with one limited caller and one without limits, as the limited one."""
    keys = {"team-a": KEY, "team-b": OTHER}
    async with fake_service(engine, api_keys=keys, key_limits=LIMITS) as client:
        client.headers.update(bearer(KEY))
        yield client


async def test_answers_say_what_is_left(limited: httpx.AsyncClient) -> None:
    answer = await limited.post("/generate", json=BODY)
    assert answer.status_code == 200
    headers = told(answer)
    assert headers.pop("limit-requests") == "4"
    assert headers.pop("limit-tokens") == "40"
    assert headers.pop("remaining-requests") == "3"
    assert headers.pop("remaining-tokens") == str(40 - 3 - 3)
    assert set(headers) == {"reset-requests", "reset-tokens"}
    for duration in headers.values():
        assert duration.endswith("s")
        assert 0 < float(duration[:-1]) <= 60
    free = await limited.post("/generate", json=BODY, headers=bearer(OTHER))
    assert told(free) == {}


async def test_a_stream_reserves_its_longest_answer_and_gives_the_rest_back(
    limited: httpx.AsyncClient,
) -> None:
    async with limited.stream("POST", "/generate", json={**BODY, "stream": True}) as answer:
        assert remaining(answer) == (3, 40 - 3 - 5)
        await answer.aread()
    assert remaining(await limited.get("/v1/models")) == (3, 40 - 3 - 3)


async def test_the_request_beyond_the_limit_is_told_when_to_come_back(
    limited: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rate_limits, "WINDOW_S", 1.0)
    body = {"prompt": "a", "max_new_tokens": 1}
    answers = [await limited.post("/generate", json=body) for _ in range(5)]
    assert [answer.status_code for answer in answers[:4]] == [200] * 4
    if answers[4].status_code == 200:
        pytest.skip("this machine takes a second for five requests")
    error = check_shape(answers[4])
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limited")
    assert "4 requests a minute" in error["message"]
    assert answers[4].headers["Retry-After"] == "1"
    assert remaining(answers[4])[0] == 0
    await asyncio.sleep(1.0)
    assert (await limited.post("/generate", json=body)).status_code == 200


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
async def test_tokens_beyond_the_limit_are_refused_in_the_same_words(
    limited: httpx.AsyncClient, engine: FakeEngine, path: str
) -> None:
    name = "max_new_tokens" if path == "/generate" else "max_tokens"
    body = {"prompt": "a " * 16, name: 10} | ({} if path == "/generate" else {"model": "fake"})
    assert (await limited.post(path, json=body)).status_code == 200  # 16 + 10 of 40
    refused = await limited.post(path, json=body)
    assert refused.status_code == 429
    error = check_shape(refused)
    assert error["code"] == "rate_limited"
    assert "26 are used or reserved and this request may take 26" in error["message"]
    assert 1 <= int(refused.headers["Retry-After"]) <= 60
    assert remaining(refused) == (3, 14)
    assert len(engine.requests) == 1


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/generate", {"prompt": "a", "max_new_tokens": 40}, "max_new_tokens"),
        ("/generate", {"prompt": "a", "max_new_tokens": 14, "n": 3}, "max_new_tokens"),
        ("/generate", {"prompt": "a " * 50, "max_new_tokens": 1}, "prompt"),
        ("/v1/completions", {"model": "fake", "prompt": "a", "max_tokens": 40}, "max_tokens"),
        (
            "/v1/chat/completions",
            {
                "model": "fake",
                "messages": [{"role": "user", "content": "a"}],
                "max_completion_tokens": 40,
            },
            "max_completion_tokens",
        ),
        (
            "/v1/chat/completions",
            {"model": "fake", "messages": [{"role": "user", "content": "a " * 50}]},
            "messages",
        ),
    ],
)
async def test_a_request_that_no_minute_holds_is_told_so(
    limited: httpx.AsyncClient, path: str, body: dict[str, Any], param: str
) -> None:
    answer = await limited.post(path, json=body)
    assert answer.status_code == 403
    error = check_shape(answer)
    assert (error["type"], error["code"]) == ("permission_error", "over_ceiling")
    assert (error["param"], error["ceiling"]) == (param, 40)
    assert error["requested"] > 40
    assert error["message"].startswith(f"{param}: ")
    assert "Retry-After" not in answer.headers
    assert remaining(answer) == (4, 40)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "unknown field": ({"x": 1}, {}),
    "out of range": ({"temperature": -1.0}, {}),
    "too long": ({"prompt": "a " * 3_000, "max_new_tokens": 1}, {}),
    "over the server's ceiling": ({"max_new_tokens": 5_000}, {}),
    "queue full": ({}, {"queue_full": True}),
    "crash": ({}, {"crash_on_submit": True}),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("why", list(REFUSED))
async def test_what_is_refused_for_another_reason_is_not_charged(
    limited: httpx.AsyncClient, engine: FakeEngine, why: str, stream: bool
) -> None:
    fields, behaviour = REFUSED[why]
    for name, value in behaviour.items():
        setattr(engine.behaviour, name, value)
    with captured_log():
        for _ in range(6):  # more than the limit
            answer = await limited.post("/generate", json={**BODY, **fields, "stream": stream})
            assert check_shape(answer)["code"] != "rate_limited"
    assert remaining(await limited.get("/v1/models")) == (4, 40)


async def test_a_failed_answer_keeps_only_what_it_used(
    limited: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.behaviour.fail_after = 2
    assert (await limited.post("/generate", json=BODY)).status_code == 500
    assert remaining(await limited.get("/v1/models")) == (3, 40 - 3 - 2)


async def test_a_caller_that_leaves_gets_the_rest_back(engine: FakeEngine) -> None:
    """In the middle of a stream, and while the request waits for its place."""
    app = create_app(settings_for_tests(key_limits=LIMITS_OF_ALL), engine)
    engine.behaviour.stall_after = 2
    async with listening(app) as url, httpx.AsyncClient(base_url=url) as client:
        async with client.stream("POST", "/generate", json={**BODY, "stream": True}) as answer:
            async for line in answer.aiter_lines():
                if "b" in json.loads(line.removeprefix("data: ") or "{}").get("text", ""):
                    break
        await until(lambda: engine.num_running == 0)
        assert remaining(await client.get("/v1/models")) == (3, 40 - 3 - 2)
        engine.behaviour.submit_s = 60.0
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/generate", json=BODY, timeout=0.3)

        async def is_back() -> bool:
            return remaining(await client.get("/v1/models")) == (3, 35)

        async with asyncio.timeout(10):
            while not await is_back():  # noqa: ASYNC110  # over HTTP
                await asyncio.sleep(0.01)


async def test_requests_at_once_do_not_overshoot(engine: FakeEngine) -> None:
    """Neither limit, while each request waits between its two charges."""
    engine.behaviour.submit_s = 0.02
    engine.behaviour.stall_after = 0  # nothing is given back
    body = {"prompt": "a b", "max_new_tokens": 8}
    for limit in ({"tokens_per_minute": 105}, {"requests_per_minute": 10}):
        async with fake_service(engine, key_limits={"default": limit}) as client:
            sent = [asyncio.create_task(client.post("/generate", json=body)) for _ in range(50)]
            # Those that are refused at once end before the others have reached the engine.
            await until(lambda sent=sent: sum(task.done() for task in sent) == 40, 30)  # type: ignore[misc]
            await until(lambda: len(engine.requests) >= 10, 30)
            assert engine.num_running == len(engine.requests) == 10
            engine.stop()
            statuses = [answer.status_code for answer in await asyncio.gather(*sent)]
        assert (statuses.count(429), statuses.count(503)) == (40, 10)
        engine.requests.clear()


async def test_without_keys_all_share_the_limits_of_everybody(engine: FakeEngine) -> None:
    async with fake_service(engine, key_limits=LIMITS_OF_ALL) as client:
        for _ in range(4):
            answer = await client.post("/generate", json={"prompt": "a", "max_new_tokens": 1})
            assert answer.status_code == 200
        assert (await client.post("/generate", json=BODY)).status_code == 429
        assert told(await client.get("/health/live")) == {}


async def test_without_limits_nothing_is_told(client: httpx.AsyncClient) -> None:
    assert told(await client.post("/generate", json=BODY)) == {}


async def test_openais_client_sees_a_rate_limit(engine: FakeEngine) -> None:
    app = create_app(settings_for_tests(key_limits=LIMITS_OF_ALL), engine)
    async with (
        listening(app) as url,
        openai.AsyncOpenAI(api_key="none", base_url=f"{url}/v1", max_retries=0) as client,
    ):
        for _ in range(4):
            raw = await client.completions.with_raw_response.create(
                model="fake", prompt="a", max_tokens=1
            )
        assert raw.headers["x-ratelimit-remaining-requests"] == "0"
        with pytest.raises(openai.RateLimitError) as caught:
            await client.completions.create(model="fake", prompt="a", max_tokens=1)
    assert caught.value.code == "rate_limited"


async def test_refusals_are_counted_by_their_codes(limited: httpx.AsyncClient) -> None:
    await limited.post("/generate", json={"prompt": "a", "max_new_tokens": 40})
    for _ in range(5):
        await limited.post("/generate", json={"prompt": "a", "max_new_tokens": 1})
    found = (await limited.get("/metrics")).text
    assert 'snapkv_request_errors_total{reason="rate_limited"} 1.0' in found
    assert 'snapkv_request_errors_total{reason="over_ceiling"} 1.0' in found
