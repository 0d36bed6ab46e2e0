"""`POST /v1/completions` with streaming: chunks, usage and failures as clients read them."""

import json
from typing import Any

import httpx
import openai
import pytest

from tests.support.fake_engine import FakeEngine

PATH = "/v1/completions"


def chunks_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """Parse a stream up to its [DONE]."""
    frames = answer.text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


async def test_stream_without_options_is_text_alone(client: httpx.AsyncClient) -> None:
    """Chunks have OpenAI's fields and no other; the last one says why the answer ended."""
    body = {"model": "fake", "prompt": "a b", "stream": True}
    answer = await client.post(PATH, json=body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    chunks = chunks_of(answer)
    created = chunks[0]["created"]
    assert chunks == [
        {
            "id": answer.headers["x-request-id"],
            "object": "text_completion",
            "created": created,
            "model": "fake",
            "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": reason}],
        }
        for text, reason in ((" a", None), (" b", "stop"))
    ]


async def test_usage_comes_last_and_only_if_asked_for(client: httpx.AsyncClient) -> None:
    """The chunk without choices has usage and report; the others name usage as null."""
    options = {"include_usage": True}
    body = {"model": "fake", "prompt": "a b", "stream": True, "stream_options": options}
    *chunks, last = chunks_of(await client.post(PATH, json=body))
    assert [chunk["usage"] for chunk in chunks] == [None, None]
    assert all("kv_cache" not in chunk for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
    assert last["kv_cache"]["original_entries"] == 2
    whole = (await client.post(PATH, json={"model": "fake", "prompt": "a b"})).json()
    assert (last["usage"], last["kv_cache"]) == (whole["usage"], whole["kv_cache"])


async def test_usage_so_far_can_be_had_with_every_chunk(client: httpx.AsyncClient) -> None:
    """Load tools count tokens by it, since a chunk may hold several."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": "fake", "prompt": "a b c", "stream": True, "stream_options": options}
    *chunks, last = chunks_of(await client.post(PATH, json=body))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {3}
    assert [chunk["usage"]["total_tokens"] for chunk in chunks] == [4, 5, 6]
    assert last["usage"] == chunks[-1]["usage"]


async def test_openais_client_reads_the_stream(openai_client: openai.AsyncOpenAI) -> None:
    """Choices are told apart, each has its end, and usage comes at the end."""
    stream = await openai_client.completions.create(
        model="fake",
        prompt="a b",
        n=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts, reasons, usages = ["", ""], [], []
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason is not None:
                reasons.append((choice.index, choice.finish_reason))
        usages.append(chunk.usage)
    assert texts == [" 0:a 0:b", " 1:a 1:b"]
    assert reasons == [(0, "stop"), (1, "stop")]
    assert usages[:-1] == [None] * 4
    assert usages[-1] is not None
    assert (usages[-1].prompt_tokens, usages[-1].completion_tokens) == (2, 4)


async def test_failure_in_mid_stream_reaches_openais_client(
    openai_client: openai.AsyncOpenAI, engine: FakeEngine
) -> None:
    """The stream raises instead of ending as if the answer were whole."""
    engine.behaviour.fail_after = 1
    stream = await openai_client.completions.create(model="fake", prompt="a b", stream=True)
    assert (await anext(stream)).choices[0].text == " a"
    with pytest.raises(openai.APIError) as caught:
        await anext(stream)
    assert caught.value.code == "generation_failed"
