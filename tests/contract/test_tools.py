"""Tools over `POST /v1/chat/completions`: offered, called, whole and streamed."""

import json
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from snapkv_core import ChatMessage, ToolCall, ToolSyntax
from tests.contract.test_generate_errors import check_shape
from tests.support.fake_engine import FakeEngine

PATH = "/v1/chat/completions"
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"$ref": "#/$defs/days"}},
            "required": ["city"],
            "$defs": {"days": {"type": "integer", "minimum": 1}},
        },
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}
#: The fake engine says its prompt again, so a prompt is what the model writes.
CALL = '<tool_call> {"name": "weather", "arguments": {"city": "Kyōto"}} </tool_call>'
OTHER_CALL = '<tool_call> {"name": "clock", "arguments": {}} </tool_call>'


def body_of(written: str, **fields: Any) -> dict[str, Any]:
    """Return a body that makes the fake engine write something, with two tools to call."""
    messages = [{"role": "user", "content": written}]
    return {"model": "fake", "messages": messages, "tools": [WEATHER, CLOCK], **fields}


def calls_of(message: Any) -> list[tuple[str, Any]]:
    """Return names and arguments of a message's calls."""
    return [
        (call.function.name, json.loads(call.function.arguments))
        for call in message.tool_calls or []
    ]


async def streamed(client: openai.AsyncOpenAI, body: dict[str, Any]) -> tuple[str, Any, Any]:
    """Return text, calls and end of a streamed answer, put together as OpenAI's client does."""
    async with client.chat.completions.stream(**body) as stream:
        completion = await stream.get_final_completion()
    (choice,) = completion.choices
    return choice.message.content or "", calls_of(choice.message), choice.finish_reason


@pytest.mark.parametrize(
    ("written", "text", "calls", "reason"),
    [
        (CALL, "", [("weather", {"city": "Kyōto"})], "tool_calls"),
        (
            f"Let me look. {CALL} {OTHER_CALL}",
            " Let me look. ",
            [("weather", {"city": "Kyōto"}), ("clock", {})],
            "tool_calls",
        ),
        ("It is sunny.", " It is sunny.", [], "stop"),
        ("a < b and <tool_calm>", " a < b and <tool_calm>", [], "stop"),
        ("<tool_call> no JSON </tool_call>", " <tool_call> no JSON </tool_call>", [], "stop"),
        (
            '<tool_call> {"name": "bomb", "arguments": {}} </tool_call>',
            ' <tool_call> {"name": "bomb", "arguments": {}} </tool_call>',
            [],
            "stop",
        ),
        ('<tool_call> {"name": "clo', ' <tool_call> {"name": "clo', [], "stop"),
    ],
)
async def test_calls_between_tags_are_found_and_all_else_is_text(
    openai_client: openai.AsyncOpenAI, written: str, text: str, calls: list[Any], reason: str
) -> None:
    """The same whole and streamed."""
    body = body_of(written)
    (choice,) = (await openai_client.chat.completions.create(**body)).choices
    assert calls_of(choice.message) == calls
    assert choice.finish_reason == reason
    expected = None if calls and not text.strip() else text
    assert choice.message.content == expected
    content, found, end = await streamed(openai_client, body)
    assert (content.strip(), found, end) == (text.strip(), calls, reason)


@pytest.mark.parametrize(
    ("written", "text", "calls"),
    [
        ('[TOOL_CALLS] [{"name": "clock", "arguments": {}}]', " ", [("clock", {})]),
        (
            '[TOOL_CALLS][{"name": "clock", "arguments": {}}, '
            '{"name": "weather", "arguments": {"city": "a b"}}]',
            " ",
            [("clock", {}), ("weather", {"city": "a b"})],
        ),
        ("[TOOL_CALLS] nothing", " [TOOL_CALLS] nothing", []),
        ('[TOOL_CALLS] [{"name": "x", "arguments": {}}]', None, []),
        ("[TOOL_BOX]", " [TOOL_BOX]", []),
    ],
)
async def test_calls_after_a_marker_are_found(
    openai_client: openai.AsyncOpenAI,
    engine: FakeEngine,
    written: str,
    text: str | None,
    calls: list[Any],
) -> None:
    engine.tool_syntax = "marker"
    body = body_of(written)
    (choice,) = (await openai_client.chat.completions.create(**body)).choices
    assert calls_of(choice.message) == calls
    if not calls:
        assert choice.message.content == (f" {written}" if text is None else text)
    assert (await streamed(openai_client, body))[1] == calls


async def test_without_parallel_calls_only_the_first_is_reported(
    openai_client: openai.AsyncOpenAI,
) -> None:
    body = body_of(f"{CALL} {OTHER_CALL}", parallel_tool_calls=False)
    (choice,) = (await openai_client.chat.completions.create(**body)).choices
    assert [name for name, _ in calls_of(choice.message)] == ["weather"]
    assert [name for name, _ in (await streamed(openai_client, body))[1]] == ["weather"]


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"weather", "clock"}),
        ({"type": "function", "function": {"name": "clock"}}, {"clock"}),
    ],
)
async def test_a_demanded_call_is_forced_by_a_schema(
    openai_client: openai.AsyncOpenAI, engine: FakeEngine, choice: Any, names: set[str]
) -> None:
    """Whatever the model's own way of writing calls is."""
    engine.tool_syntax = None
    written = '{"name": "clock", "arguments": {"zone": "UTC"}}'
    body = body_of(written, tool_choice=choice)
    (answer,) = (await openai_client.chat.completions.create(**body)).choices
    assert calls_of(answer.message) == [("clock", {"zone": "UTC"})]
    assert (answer.message.content, answer.finish_reason) == (None, "tool_calls")
    assert await streamed(openai_client, body) == ("", [("clock", {"zone": "UTC"})], "tool_calls")
    schema = json.loads(engine.requests[0].sampling.json_schema or "")
    allowed = jsonschema.Draft202012Validator(schema)
    assert {
        name
        for name in ("weather", "clock", "bomb")
        if allowed.is_valid({"name": name, "arguments": {"city": "x", "days": 1}})
    } == names
    assert not allowed.is_valid({"name": "weather", "arguments": {"city": "x", "days": 0}})
    assert not allowed.is_valid({"name": "weather", "arguments": {"city": 1}})
    assert not allowed.is_valid("a text")


async def test_a_demanded_call_that_is_cut_off_is_text(openai_client: openai.AsyncOpenAI) -> None:
    """Its finish reason says why."""
    body = body_of('{"name": "clock", "arguments": {}}', tool_choice="required", max_tokens=2)
    (answer,) = (await openai_client.chat.completions.create(**body)).choices
    assert answer.message.tool_calls is None
    assert (answer.message.content, answer.finish_reason) == (' {"name": "clock",', "length")


async def test_the_template_is_given_tools_and_calls(
    openai_client: openai.AsyncOpenAI, engine: FakeEngine
) -> None:
    """Except where none may be called."""
    call: Any = {
        "id": "abc",
        "type": "function",
        "function": {"name": "clock", "arguments": '{"a": 1}'},
    }
    messages: Any = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "noon", "tool_call_id": "abc"},
    ]
    for choice in ("auto", "none"):
        await openai_client.chat.completions.create(
            model="fake", messages=messages, tools=[WEATHER, CLOCK], tool_choice=choice
        )
    offered, hidden = engine.requests
    assert offered.prompt == (
        ChatMessage("user", "a"),
        ChatMessage("assistant", None, (ToolCall("abc", "clock", '{"a": 1}'),)),
        ChatMessage("tool", "noon", (), "abc"),
    )
    assert [json.loads(tool) for tool in offered.tools] == [WEATHER, CLOCK]
    assert hidden.tools == ()


@pytest.mark.parametrize(
    ("fields", "syntax", "param", "part"),
    [
        ({"tools": None, "tool_choice": "required"}, "tags", "tool_choice", "with tools"),
        ({"tool_choice": "auto"}, None, "tool_choice", "send required, or a name"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "bomb"}}},
            "tags",
            "tool_choice",
            "no tool has the name 'bomb'",
        ),
        ({"tools": [CLOCK, CLOCK]}, "tags", "tools", "same name"),
        ({"response_format": {"type": "json_object"}}, "tags", "response_format", "with tools"),
        ({"tool_choice": "required", "stop": "x"}, "tags", "stop", "cannot be used with tools"),
    ],
)
async def test_what_does_not_agree_is_a_400(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    fields: dict[str, Any],
    syntax: ToolSyntax | None,
    param: str,
    part: str,
) -> None:
    engine.tool_syntax = syntax
    answer = await client.post(PATH, json=body_of("a", **fields))
    error = check_shape(answer)
    assert (answer.status_code, error["param"]) == (400, param), error
    assert part in error["message"]
    assert engine.requests == []
