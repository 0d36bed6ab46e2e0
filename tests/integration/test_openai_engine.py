"""OpenAI's client against the real engine: what it streams is what it gets whole."""

import asyncio
import json
import random
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

import jsonschema
import openai
import pytest

from app.main import create_app
from snapkv_core import AsyncEngine
from tests.support.app_client import listening, settings_for_tests
from tests.support.engines import make_engine
from tests.support.models import build_model
from tests.support.schemas import bounded_schema

NUM_REQUESTS = 50
MODEL = "tiny"


@pytest.fixture
async def client() -> AsyncIterator[openai.AsyncOpenAI]:
    """Serve a tiny random model, one token a byte, whose answers are full of half characters."""
    engine = AsyncEngine(make_engine(build_model("llama", 2, seed=31), max_num_seqs=32))
    async with (
        listening(create_app(settings_for_tests(), engine)) as url,
        openai.AsyncOpenAI(api_key="none", base_url=f"{url}/v1", max_retries=0) as client,
    ):
        yield client


def drawn_request(rng: random.Random) -> dict[str, Any]:
    """Draw a request; half of them sample, most have stops that such answers often hold."""
    body: dict[str, Any] = {
        "model": MODEL,
        "prompt": "".join(rng.choice("abc äß日\n") for _ in range(rng.randint(1, 40))),
        "max_tokens": rng.randint(1, 14),
        "seed": rng.randrange(2**40),
        "temperature": rng.choice([0.0, 1.0, 1.4]),
        "n": rng.randint(1, 3),
        "logprobs": rng.choice([None, 0, 2]),
        "echo": rng.random() < 0.2,
    }
    if rng.random() < 0.6:
        body["stop"] = rng.sample([chr(code) for code in range(33, 127)], 3)
    if rng.random() < 0.3:
        body["presence_penalty"] = rng.uniform(-2, 2)
        body["logit_bias"] = {str(rng.randrange(256)): rng.uniform(-5, 5)}
    return body


async def streamed(client: openai.AsyncOpenAI, body: dict[str, Any]) -> dict[int, list[Any]]:
    """Return text, tokens' log-probabilities and end of each choice, from pieces; then usage."""
    found: dict[int, list[Any]] = defaultdict(lambda: ["", [], None])
    options: Any = {"include_usage": True}
    async for chunk in await client.completions.create(**body, stream=True, stream_options=options):
        for piece in chunk.choices:
            found[piece.index][0] += piece.text
            found[piece.index][1] += reported(piece.logprobs)
            found[piece.index][2] = piece.finish_reason or found[piece.index][2]
        if chunk.usage:
            found[-1] = [chunk.usage.prompt_tokens, chunk.usage.completion_tokens]
    return dict(found)


async def whole(client: openai.AsyncOpenAI, body: dict[str, Any]) -> dict[int, list[Any]]:
    """Return the same of an answer that comes at once."""
    answer = await client.completions.create(**body)
    found: dict[int, list[Any]] = {
        choice.index: [choice.text, reported(choice.logprobs), choice.finish_reason]
        for choice in answer.choices
    }
    assert answer.usage is not None
    found[-1] = [answer.usage.prompt_tokens, answer.usage.completion_tokens]
    return found


def reported(logprobs: Any) -> list[Any]:
    """Return log-probabilities token by token."""
    if logprobs is None:
        return []
    columns = (logprobs.tokens, logprobs.token_logprobs, logprobs.text_offset)
    return list(zip(*columns, strict=True))


async def test_streamed_and_whole_answers_are_equal_for_fifty_random_requests(
    client: openai.AsyncOpenAI,
) -> None:
    """Stops, seeds, choices, log-probabilities, echoes and penalties, ten at once."""
    rng = random.Random(5)
    bodies = [drawn_request(rng) for _ in range(NUM_REQUESTS)]
    ends: set[str] = set()
    for start in range(0, NUM_REQUESTS, 10):
        some = bodies[start : start + 10]
        at_once = await asyncio.gather(*(whole(client, body) for body in some))
        in_pieces = await asyncio.gather(*(streamed(client, body) for body in some))
        for body, expected, found in zip(some, at_once, in_pieces, strict=True):
            assert found == expected, body
            num_prompt_tokens, num_output_tokens = expected.pop(-1)
            assert num_prompt_tokens == len(body["prompt"].encode())
            assert 1 <= num_output_tokens <= body["n"] * body["max_tokens"]
            num_echoed = num_prompt_tokens * body["n"] if body["echo"] else 0
            if body["logprobs"] is not None:
                num_reported = sum(len(tokens) for _, tokens, _ in expected.values())
                assert num_reported == num_output_tokens + num_echoed
            for text, _, reason in expected.values():
                ends.add(reason)
                answer = text.removeprefix(body["prompt"]) if body["echo"] else text
                assert not any(stop in answer for stop in body.get("stop", []))
                assert body["echo"] is text.startswith(body["prompt"])
    assert ends == {"stop", "length"}


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_in_json_match_their_schemas_over_http(
    client: openai.AsyncOpenAI, stream: bool
) -> None:
    """Chat and completions, greedy and sampled."""
    for number in range(6):
        schema = {**bounded_schema(random.Random(1_000 + number), depth=1)}
        form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        body: dict[str, Any] = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "Say something."}],
            "response_format": form,
            "max_tokens": 400,
            "temperature": number % 2,
        }
        if stream:
            pieces = await client.chat.completions.create(**body, stream=True)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in pieces])
        else:
            (choice,) = (await client.chat.completions.create(**body)).choices
            assert choice.finish_reason == "stop"
            text = choice.message.content or ""
        assert jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)), (schema, text)


async def test_a_keyword_that_is_not_supported_is_a_400(client: openai.AsyncOpenAI) -> None:
    """It names the keyword and where it is."""
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "a"}],
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"not": {}}},
            },
        )
    assert caught.value.param == "response_format"
    assert "'not' at # is not supported" in caught.value.message
