"""`POST /v1/chat/completions`, driven by OpenAI's own client and by bodies it would never send."""

import json
from typing import Any

import httpx
import openai
import pytest

from app.api.schemas.chat import MAX_PARTS, ChatCompletionRequest
from snapkv_core import ChatMessage, CompressionConfig
from tests.contract.test_generate_errors import BAD_VALUES, NOT_INTEGERS, check_shape
from tests.contract.test_openai import BAD as BAD_COMPLETION
from tests.contract.test_openai import send
from tests.contract.test_openai_stream import chunks_of
from tests.support.fake_engine import UNKNOWN_ROLE, FakeEngine

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "a b c"}]
TEXT = {"type": "text", "text": "a b"}

TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
NO_OBJECTS: list[Any] = ["", "[]", "{", {}, None]
WRONG_CALLS: list[dict[str, Any]] = [
    *({"id": ""}, {"type": "x"}, {"function": {"name": "f"}}, {"x": 1}),
    *({"function": {"name": "f", "arguments": text}} for text in NO_OBJECTS),
]

#: Fields that both of OpenAI's routes have mean the same on both.
SHARED = set(ChatCompletionRequest.model_fields) & set(BAD_COMPLETION) - {"logprobs"}
BAD: dict[str, list[Any]] = {
    **{name: BAD_COMPLETION[name] for name in sorted(SHARED)},
    "messages": [
        *BAD_VALUES["messages"],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "text", "text": 1}]}],
        [{"role": "user", "content": [{**TEXT, "x": 1}]}],
        [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}],
        [{"role": "user", "content": [TEXT] * (MAX_PARTS + 1)}],
        [{"role": "user", "content": "a", "name": "somebody"}],
        [{"role": "assistant", "content": "a", "tool_calls": []}],
        [{"role": "assistant"}],
        [{"role": "tool", "content": "a", "tool_call_id": ""}],
        *([{"role": "assistant", "tool_calls": [{**CALL, **wrong}]}] for wrong in WRONG_CALLS),
    ],
    "max_completion_tokens": [*NOT_INTEGERS, 0, -1, 4_097],
    "logprobs": [0, 1, ""],
    "top_logprobs": [-1, 21, 1.0, True, ""],
    "tools": [
        *({}, "x", False, [1], [{}], [{"type": "function"}], [TOOL, TOOL], [TOOL] * 129),
        *([{**TOOL, "type": "retrieval"}], [{**TOOL, "x": 1}]),
        *([{"type": "function", "function": {"name": name}}] for name in ("", "a b", "ä", 1, None)),
        [{"type": "function", "function": {"name": "f", "parameters": []}}],
    ],
    "tool_choice": [
        *("auto", "required", {"type": "function"}, False, "f"),
        *({"type": "function", "function": {"name": "f"}}, {"type": "function", "name": "f"}),
    ],
    "parallel_tool_calls": ["true", 1, 0, []],
    "store": [True, 0, "false"],
    "metadata": [{"a": "b"}, [], ""],
    "modalities": [["text", "audio"], [], "text"],
    "reasoning_effort": ["low", "", 1],
    "service_tier": ["flex", "", 1],
}
CASES = [
    pytest.param(field, value, id=f"{field}-{json.dumps(value)[:24]}-{number}")
    for field, values in BAD.items()
    for number, value in enumerate(values)
]


async def test_answer_has_exactly_openais_fields_and_two_more(client: httpx.AsyncClient) -> None:
    """`kv_cache` and `snapshot` are the only fields that OpenAI's answer does not have."""
    answer = await client.post(PATH, json={"model": "fake", "messages": HELLO, "max_tokens": 2})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body.pop("created") > 1_700_000_000
    assert body.pop("kv_cache")["original_entries"] == 3
    assert body == {
        "id": answer.headers["x-request-id"],
        "object": "chat.completion",
        "model": "fake",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": " a b", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
        "snapshot": "off",
    }


async def test_openais_client_gets_the_answer(
    openai_client: openai.AsyncOpenAI, engine: FakeEngine
) -> None:
    """Every field it can send reaches the engine, our own as extra fields of the body."""
    messages: Any = [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, TEXT]},
    ]
    answer = await openai_client.chat.completions.create(
        model="fake",
        messages=messages,
        max_completion_tokens=2,
        temperature=0.5,
        top_p=0.9,
        n=2,
        stop=["x", "y"],
        seed=11,
        user="somebody",
        response_format={"type": "text"},
        extra_body={"top_k": 3, "ignore_eos": True, "max_capacity_prompt": 100, "window_size": 8},
        extra_headers={"X-Request-Timeout": "30"},
    )
    found = [(choice.message.content, choice.finish_reason) for choice in answer.choices]
    assert found == [(" 0:be 0:short", "length"), (" 1:be 1:short", "length")]
    assert {choice.message.role for choice in answer.choices} == {"assistant"}
    (request,) = engine.requests
    sampling = request.sampling
    assert request.prompt == (ChatMessage("system", "be short"), ChatMessage("user", "a\na b"))
    assert (sampling.max_new_tokens, sampling.temperature, sampling.top_p) == (2, 0.5, 0.9)
    assert (sampling.n, sampling.stop, sampling.seed) == (2, ("x", "y"), 11)
    assert (sampling.top_k, sampling.ignore_eos, request.timeout_s) == (3, True, 30.0)
    assert request.compression == CompressionConfig("snapkv", 100, 8, 15, "max")


async def test_openais_client_reads_the_stream(openai_client: openai.AsyncOpenAI) -> None:
    """Its text is that of the whole answer, each choice begins with its role, usage comes last."""
    arguments: dict[str, Any] = {"model": "fake", "messages": HELLO, "n": 2, "seed": 1}
    whole = await openai_client.chat.completions.create(**arguments)
    stream = await openai_client.chat.completions.create(
        **arguments, stream=True, stream_options={"include_usage": True}
    )
    texts, roles, reasons, usages = ["", ""], [], [], []
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.delta.role is not None:
                roles.append((choice.index, choice.delta.role))
            if choice.finish_reason is not None:
                reasons.append((choice.index, choice.finish_reason))
        if chunk.usage is not None:
            usages.append(chunk.usage)
    assert texts == [choice.message.content for choice in whole.choices]
    assert roles == [(0, "assistant"), (1, "assistant")]
    assert reasons == [(0, "stop"), (1, "stop")]
    assert usages == [whole.usage]


async def test_chunks_have_openais_fields(client: httpx.AsyncClient) -> None:
    body = {"model": "fake", "messages": HELLO, "max_tokens": 1, "stream": True}
    answer = await client.post(PATH, json=body)
    chunks = chunks_of(answer)
    common = {
        "id": answer.headers["x-request-id"],
        "object": "chat.completion.chunk",
        "created": chunks[0]["created"],
        "model": "fake",
    }
    deltas = [({"role": "assistant", "content": ""}, None), ({"content": " a"}, "length")]
    assert chunks == [
        {
            **common,
            "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}],
        }
        for delta, reason in deltas
    ]


async def test_values_that_ask_for_nothing_are_accepted(client: httpx.AsyncClient) -> None:
    """What clients send out of habit is no reason to refuse them."""
    neutral = {name: values[0] for name, values in ChatCompletionRequest.NEUTRAL.items() if values}
    for habits in (neutral, dict.fromkeys(ChatCompletionRequest.NEUTRAL)):
        answer = await client.post(PATH, json={"model": "fake", "messages": HELLO, **habits})
        assert answer.status_code == 200, answer.text


async def test_length_is_given_once(client: httpx.AsyncClient) -> None:
    body = {"model": "fake", "messages": HELLO, "max_tokens": 2, "max_completion_tokens": 2}
    answer = await client.post(PATH, json=body)
    error = check_shape(answer)
    assert (answer.status_code, error["param"]) == (400, "max_completion_tokens")


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_length_out_of_range_is_named_as_it_was_sent(
    client: httpx.AsyncClient, name: str
) -> None:
    answer = await client.post(PATH, json={"model": "fake", "messages": HELLO, name: 5_000})
    error = check_shape(answer)
    assert (answer.status_code, error["param"]) == (400, name)
    assert error["message"].startswith(f"{name}: ")


async def test_template_that_refuses_a_message_is_quoted(client: httpx.AsyncClient) -> None:
    messages = [{"role": UNKNOWN_ROLE, "content": "a"}]
    answer = await client.post(PATH, json={"model": "fake", "messages": messages})
    error = check_shape(answer)
    assert (answer.status_code, error["param"]) == (400, "messages")
    assert "the chat template knows no such role" in error["message"]


async def test_misspelt_field_gets_a_suggestion(client: httpx.AsyncClient) -> None:
    answer = await client.post(PATH, json={"model": "fake", "messages": HELLO, "message": 1})
    assert "did you mean messages?" in check_shape(answer)["message"]


async def test_other_model_is_a_404(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = await client.post(PATH, json={"model": "gpt-9", "messages": HELLO})
    assert (answer.status_code, check_shape(answer)["code"]) == (404, "model_not_found")
    assert engine.requests == []


def test_every_field_has_bad_values() -> None:
    """A new field of the request joins the table."""
    assert set(BAD) == set(ChatCompletionRequest.model_fields)


@pytest.mark.parametrize(("field", "value"), CASES)
async def test_bad_value_is_a_400_that_names_the_field(
    client: httpx.AsyncClient, engine: FakeEngine, field: str, value: Any
) -> None:
    """Never a 422, never ignored; the next request works."""
    needed = {"stream_options": {"stream": True}, "top_logprobs": {"logprobs": True}}.get(field, {})
    answer = await send(client, {"model": "fake", "messages": HELLO, **needed, field: value}, PATH)
    assert answer.status_code == 400, answer.text
    related = {"window_size": "max_capacity_prompt"}  # capacity and window are one pair
    assert check_shape(answer)["param"].partition(".")[0] in (field, related.get(field))
    assert engine.requests == []
    assert (await send(client, {"model": "fake", "messages": HELLO}, PATH)).status_code == 200
