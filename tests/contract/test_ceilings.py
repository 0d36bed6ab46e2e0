"""What a caller may ask for at most: named values are refused beyond it, omitted ones shrink."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from app.main import create_app
from tests.contract.test_generate_errors import check_shape
from tests.support.app_client import fake_service, listening, settings_for_tests
from tests.support.fake_engine import FakeEngine

KEY, OTHER = "key-of-team-a-0123", "key-of-team-b-4567"
KEYS = {"team-a": KEY, "team-b": OTHER}
LIMITS = {
    "team-a": {
        "max_capacity_prompt": 64,
        "max_prompt_tokens": 100,
        "max_new_tokens": 20,
        "max_choices": 2,
    }
}
LONG = "a " * 80


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
async def bounded(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    """Serve with one caller that has ceilings, as that caller, and one that has none."""
    async with fake_service(engine, api_keys=KEYS, key_limits=LIMITS) as client:
        client.headers.update(bearer(KEY))
        yield client


#: Fields beside the prompt, the field that is named, what was asked for, and the ceiling.
ABOVE: list[tuple[dict[str, Any], str, int, int]] = [
    ({"max_capacity_prompt": 65}, "max_capacity_prompt", 65, 64),
    ({"max_capacity_prompt": 65, "method": "full"}, "max_capacity_prompt", 65, 64),
    ({"profile": "qa"}, "max_capacity_prompt", 2_048, 64),
    ({"profile": "qa", "window_size": 8}, "max_capacity_prompt", 2_048, 64),
    ({"method": "full", "prompt": LONG}, "method", 80, 64),
    ({"prompt": "a " * 101}, "prompt", 101, 100),
    ({"max_new_tokens": 21}, "max_new_tokens", 21, 20),
    ({"n": 3}, "n", 3, 2),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "param", "requested", "ceiling"), ABOVE)
async def test_a_value_above_the_ceiling_is_refused_with_both_numbers(
    bounded: httpx.AsyncClient,
    engine: FakeEngine,
    fields: dict[str, Any],
    param: str,
    requested: int,
    ceiling: int,
    stream: bool,
) -> None:
    body = {"prompt": "a", **fields, "stream": stream}
    answer = await bounded.post("/generate", json=body)
    assert answer.status_code == 403
    error = check_shape(answer)
    assert (error["type"], error["code"]) == ("permission_error", "over_ceiling")
    assert (error["param"], error["requested"], error["ceiling"]) == (param, requested, ceiling)
    assert error["message"].startswith(f"{param}: ")
    assert str(requested) in error["message"]
    assert str(ceiling) in error["message"]
    assert engine.requests == []
    free = await bounded.post("/generate", json={**body, "stream": False}, headers=bearer(OTHER))
    assert free.status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"max_capacity_prompt": 64, "prompt": LONG},
        {"profile": "qa", "max_capacity_prompt": 64},
        {"method": "full", "prompt": "a " * 64},
        {"prompt": "a " * 100},
        {"max_new_tokens": 20, "n": 2},
    ],
)
async def test_what_reaches_the_ceiling_is_answered(
    bounded: httpx.AsyncClient, fields: dict[str, Any]
) -> None:
    assert (await bounded.post("/generate", json={"prompt": "a", **fields})).status_code == 200


async def test_what_is_left_out_shrinks_to_the_ceiling(
    bounded: httpx.AsyncClient, engine: FakeEngine
) -> None:
    """The server's defaults are 512 entries and 256 tokens."""
    answer = await bounded.post("/generate", json={"prompt": LONG})
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 20
    assert engine.requests[-1].compression.max_capacity_prompt == 64
    assert answer.json()["kv_cache"]["compressed_entries"] == 64
    await bounded.post("/generate", json={"prompt": LONG, "kernel_size": 5, "window_size": 8})
    knobs = engine.requests[-1].compression
    assert (knobs.max_capacity_prompt, knobs.window_size, knobs.kernel_size) == (64, 8, 5)
    free = await bounded.post("/generate", json={"prompt": LONG}, headers=bearer(OTHER))
    assert free.json()["usage"]["completion_tokens"] == 80
    assert engine.requests[-1].compression.max_capacity_prompt == 512


async def test_a_refused_request_costs_nothing(engine: FakeEngine) -> None:
    limits = {"default": {"max_prompt_tokens": 10, "requests_per_minute": 2}}
    async with fake_service(engine, key_limits=limits) as client:
        for _ in range(3):
            answer = await client.post("/generate", json={"prompt": LONG})
            assert (answer.status_code, answer.json()["error"]["param"]) == (403, "prompt")
        assert answer.headers["x-ratelimit-remaining-requests"] == "2"


async def test_openais_client_is_told_in_its_own_words(engine: FakeEngine) -> None:
    app = create_app(settings_for_tests(api_keys=KEYS, key_limits=LIMITS), engine)
    messages: Any = [{"role": "user", "content": LONG + LONG}]
    async with (
        listening(app) as url,
        openai.AsyncOpenAI(api_key=KEY, base_url=f"{url}/v1", max_retries=0) as client,
    ):
        with pytest.raises(openai.PermissionDeniedError) as caught:
            await client.completions.create(model="fake", prompt="a", max_tokens=21)
        assert (caught.value.code, caught.value.param) == ("over_ceiling", "max_tokens")
        assert "max_tokens: at most 20 for this caller, got 21" in caught.value.message
        with pytest.raises(openai.PermissionDeniedError) as caught:
            await client.chat.completions.create(model="fake", messages=messages)
        assert (caught.value.code, caught.value.param) == ("over_ceiling", "messages")
