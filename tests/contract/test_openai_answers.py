"""Log-probabilities, echo, several prompts and explanations, as OpenAI's client reads them."""

import random
from collections import defaultdict
from typing import Any

import httpx
import openai
import pytest

from snapkv_core import EngineConfig
from tests.contract.test_generate_errors import check_shape
from tests.contract.test_openai_stream import chunks_of
from tests.support.app_client import fake_service
from tests.support.fake_engine import FakeEngine

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
#: What the fake engine gives for each token.
LOGPROB = -0.5


async def test_chat_reports_tokens_with_bytes_and_alternatives(
    openai_client: openai.AsyncOpenAI,
) -> None:
    answer = await openai_client.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": "grün b"}],
        logprobs=True,
        top_logprobs=2,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    first, second = logprobs.content
    assert (first.token, first.logprob, first.bytes) == (" grün", LOGPROB, list(" grün".encode()))
    assert [(top.token, top.logprob) for top in first.top_logprobs] == [
        (" grün", LOGPROB),
        ("top1", -2.0),
    ]
    assert second.token == " b"


async def test_completions_report_tokens_with_offsets(openai_client: openai.AsyncOpenAI) -> None:
    answer = await openai_client.completions.create(model="fake", prompt="grün b", logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == [" grün", " b"]
    assert logprobs.token_logprobs == [LOGPROB, LOGPROB]
    assert logprobs.top_logprobs == [
        {" grün": LOGPROB, "top1": -2.0},
        {" b": LOGPROB, "top1": -2.0},
    ]
    assert logprobs.text_offset == [0, 5]


async def test_no_alternatives_still_name_the_token(openai_client: openai.AsyncOpenAI) -> None:
    """As OpenAI's API does: of `logprobs` tokens and the one that is there."""
    answer = await openai_client.completions.create(model="fake", prompt="a", logprobs=0)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.top_logprobs == [{" a": LOGPROB}]
    chat = await openai_client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "a"}], logprobs=True
    )
    assert chat.choices[0].logprobs is not None
    assert chat.choices[0].logprobs.content is not None
    assert chat.choices[0].logprobs.content[0].top_logprobs == []


async def test_an_echo_has_the_prompt_in_text_and_tokens(
    openai_client: openai.AsyncOpenAI,
) -> None:
    answer = await openai_client.completions.create(
        model="fake", prompt="grün b", echo=True, logprobs=1, max_tokens=1, n=2
    )
    for index, choice in enumerate(answer.choices):
        assert choice.text == f"grün b {index}:grün"
        assert choice.logprobs is not None
        assert choice.logprobs.tokens == ["grün", " b", f" {index}:grün"]
        assert choice.logprobs.token_logprobs == [None, LOGPROB, LOGPROB]
        assert choice.logprobs.top_logprobs is not None
        assert choice.logprobs.top_logprobs[0] is None
        assert choice.logprobs.text_offset == [0, 4, 6]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 2)


async def test_several_prompts_are_answered_in_their_order(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    """Each is a request of its own to the engine; the report names them one by one."""
    body = {"model": "fake", "prompt": ["a b", "c", [5, 6, 7]], "n": 2, "max_tokens": 5}
    answer = await client.post(COMPLETIONS, json=body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert [(choice["index"], choice["text"]) for choice in found["choices"]] == [
        *((0, " 0:a 0:b"), (1, " 1:a 1:b")),
        *((2, " 0:c"), (3, " 1:c")),
        *((4, " 0:5 0:6 0:7"), (5, " 1:5 1:6 1:7")),
    ]
    assert found["usage"] == {"prompt_tokens": 6, "completion_tokens": 12, "total_tokens": 18}
    assert "kv_cache" not in found
    assert [part["usage"]["prompt_tokens"] for part in found["prompts"]] == [2, 1, 3]
    assert [part["kv_cache"]["original_entries"] for part in found["prompts"]] == [2, 1, 3]
    assert answer.headers["x-snapshot"] == "off, off, off"
    assert [request.prompt for request in engine.requests] == ["a b", "c", (5, 6, 7)]
    assert len({request.request_id for request in engine.requests}) == 3
    assert found["id"] == answer.headers["x-request-id"]
    assert engine.num_running == 0


async def test_a_list_of_one_prompt_is_that_prompt(client: httpx.AsyncClient) -> None:
    one = (await client.post(COMPLETIONS, json={"model": "fake", "prompt": ["a b"]})).json()
    same = (await client.post(COMPLETIONS, json={"model": "fake", "prompt": "a b"})).json()
    for changing in ("id", "created"):
        del one[changing], same[changing]
    assert one == same


async def test_more_prompts_than_the_engine_ever_takes_are_a_400(engine: FakeEngine) -> None:
    """A 429 would be tried again for ever."""
    engine.config = EngineConfig(max_num_seqs=2, max_num_waiting=1)
    async with fake_service(engine) as client:
        body = {"model": "fake", "prompt": ["a"] * 4}
        error = check_shape(await client.post(COMPLETIONS, json=body))
        fewer = await client.post(COMPLETIONS, json={**body, "prompt": ["a"] * 3})
    assert (error["param"], fewer.status_code) == ("prompt", 200)
    assert "at most 3 prompts here, got 4" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_one_refused_prompt_refuses_them_all(
    client: httpx.AsyncClient, engine: FakeEngine, stream: bool
) -> None:
    """What was submitted of the others is taken back."""
    long = " ".join(["w"] * 2_048)
    body = {"model": "fake", "prompt": ["a", long, "b"], "max_tokens": 5, "stream": stream}
    answer = await client.post(COMPLETIONS, json=body)
    error = check_shape(answer)
    assert (answer.status_code, error["code"]) == (400, "prompt_too_long")
    assert "prompt 2 of 3" in error["message"]
    assert engine.num_running == 0
    assert len(engine.aborted) == len(engine.requests) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_one_failing_prompt_ends_the_others(
    client: httpx.AsyncClient, engine: FakeEngine, stream: bool
) -> None:
    engine.behaviour.fail_after = 2
    body = {"model": "fake", "prompt": ["a b c", "d e f"], "stream": stream}
    answer = await client.post(COMPLETIONS, json=body)
    assert answer.status_code == (200 if stream else 500)
    assert "generation_failed" in answer.text
    assert engine.num_running == 0


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_an_explanation_counts_the_heads_that_kept_each_token(
    client: httpx.AsyncClient, path: str
) -> None:
    """On these routes as on `/generate`, and in a stream with the usage."""
    prompt: dict[str, Any] = {"prompt": "a b c"}
    if path == CHAT:
        prompt = {"messages": [{"role": "user", "content": "a b c"}]}
    body = {"model": "fake", "explain": True, **prompt}
    explained = (await client.post(path, json=body)).json()["explain"]
    own = await client.post("/generate", json={"prompt": "a b c", "explain": True})
    assert explained == own.json()["explain"]
    assert explained["kept_counts"] == [4, 4, 4]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *_, last = chunks_of(await client.post(path, json={**body, **options}))
    assert last["explain"] == explained


def drawn_request(rng: random.Random) -> dict[str, Any]:
    """Draw a body with stops, seeds, choices and log-probabilities."""
    words = [rng.choice(["a", "grün", "stop", "b", "'", "日本"]) for _ in range(rng.randint(1, 9))]
    body: dict[str, Any] = {
        "model": "fake",
        "n": rng.randint(1, 3),
        "max_tokens": rng.randint(1, 12),
        "seed": rng.randrange(2**40),
    }
    if rng.random() < 0.5:
        body["stop"] = rng.sample(["op", "b", "x y"], rng.randint(1, 2))
    if rng.random() < 0.5:
        return {**body, "prompt": " ".join(words), "logprobs": rng.choice([None, 0, 3])}
    is_told = rng.random() < 0.5
    alternatives = {"top_logprobs": rng.randint(0, 3)} if is_told else {}
    messages = [{"role": "user", "content": " ".join(words)}]
    return {**body, "messages": messages, "logprobs": is_told, **alternatives}


@pytest.mark.parametrize("number", range(10))
async def test_a_streamed_answer_is_the_whole_one_in_pieces(
    client: httpx.AsyncClient, number: int
) -> None:
    """Texts, ends, usage and log-probabilities of each choice, offsets included."""
    body = drawn_request(random.Random(number))
    path = CHAT if "messages" in body else COMPLETIONS
    whole = (await client.post(path, json=body)).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = chunks_of(await client.post(path, json={**body, **options}))
    texts: dict[int, str] = defaultdict(str)
    ends: dict[int, str] = {}
    logprobs: dict[int, list[Any]] = defaultdict(list)
    for piece in (piece for chunk in chunks for piece in chunk["choices"]):
        texts[piece["index"]] += (
            piece["delta"].get("content", "") if path == CHAT else piece["text"]
        )
        if piece["finish_reason"]:
            ends[piece["index"]] = piece["finish_reason"]
        if piece["logprobs"]:
            logprobs[piece["index"]] += parts_of(piece["logprobs"])
    for choice in whole["choices"]:
        index = choice["index"]
        assert texts[index] == (choice["message"]["content"] if path == CHAT else choice["text"])
        assert ends[index] == choice["finish_reason"]
        expected = [] if choice["logprobs"] is None else parts_of(choice["logprobs"])
        assert logprobs[index] == expected
    assert chunks[-1]["usage"] == whole["usage"]


def parts_of(logprobs: dict[str, Any]) -> list[Any]:
    """Return log-probabilities token by token."""
    if "content" in logprobs:
        return list(logprobs["content"])
    return list(zip(*(logprobs[name] for name in sorted(logprobs)), strict=True))
