"""Asks the service for every field of OpenAI's client, and writes down what became of it.

Run as a module it prints `docs/openai-compatibility.md`.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import httpx
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chat

from tests.support.app_client import fake_service
from tests.support.fake_engine import FakeEngine
from tests.support.markdown import ROOT

PAGE: Final = ROOT / "docs" / "openai-compatibility.md"
_CALLS: Final = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
_TOOL: Final = {"type": "function", "function": {"name": "f"}}
_SCHEMA: Final = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": 1}}}


@dataclass(frozen=True, slots=True)
class Probe:
    """How a field is asked for.

    Attributes:
        value: Asks for something.
        beside: Fields that it needs.
    """

    value: Any
    beside: Mapping[str, Any] = field(default_factory=dict)


_COMMON: Final = {
    "frequency_penalty": Probe(0.5),
    "logit_bias": Probe({"5": -100}),
    "max_tokens": Probe(1),
    "n": Probe(2),
    "presence_penalty": Probe(0.5),
    "seed": Probe(7),
    "stop": Probe(["b"]),
    "stream": Probe(True),
    "stream_options": Probe({"include_usage": True}, {"stream": True}),
    "temperature": Probe(0.5),
    "top_p": Probe(0.5),
    "user": Probe("somebody"),
}
#: Path -> field of OpenAI's client -> how it is asked for.
PROBES: Final[dict[str, dict[str, Probe]]] = {
    "/v1/chat/completions": {
        **_COMMON,
        "audio": Probe({"format": "mp3", "voice": "alloy"}),
        "function_call": Probe("auto"),
        "functions": Probe([{"name": "f"}]),
        "logprobs": Probe(True),
        "max_completion_tokens": Probe(1),
        "messages": Probe([{"role": "user", "content": "other words"}]),
        "metadata": Probe({"a": "b"}),
        "modalities": Probe(["text", "audio"]),
        "model": Probe("fake"),
        "moderation": Probe({"model": "omni-moderation-latest"}),
        "parallel_tool_calls": Probe(
            False,
            {"tools": [_TOOL], "messages": [{"role": "user", "content": _CALLS + _CALLS}]},
        ),
        "prediction": Probe({"type": "content", "content": "a"}),
        "prompt_cache_key": Probe("a"),
        "prompt_cache_options": Probe({}),
        "prompt_cache_retention": Probe("24h"),
        "reasoning_effort": Probe("low"),
        "response_format": Probe(_SCHEMA),
        "safety_identifier": Probe("a"),
        "service_tier": Probe("flex"),
        "store": Probe(True),
        "tool_choice": Probe("required", {"tools": [_TOOL]}),
        "tools": Probe([_TOOL]),
        "top_logprobs": Probe(2, {"logprobs": True}),
        "verbosity": Probe("low"),
        "web_search_options": Probe({}),
    },
    "/v1/completions": {
        **_COMMON,
        "best_of": Probe(3),
        "echo": Probe(True),
        "logprobs": Probe(2),
        "model": Probe("fake"),
        "prompt": Probe(["other words", [5, 6]]),
        "suffix": Probe("a"),
    },
}
_NEEDED: Final[dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a b c"}]},
    "/v1/completions": {"prompt": "a b c"},
}
_HEAD: Final = """\
# OpenAI's fields, one by one

What becomes of each field that OpenAI's Python client can send. The table is written by the tests,
which send every field and look at what reaches the engine and what comes back: `works` changed one
of the two, `accepted` changed nothing, `refused` was a 400 with the reason that stands beside it.
Nothing is ignored silently. What the fields mean here: [api.md](api.md#openais-routes).
"""


def client_fields(path: str) -> set[str]:
    """Return the fields that OpenAI's client can send to a route."""
    params = chat if path == "/v1/chat/completions" else completions
    return {*params.CompletionCreateParamsBase.__annotations__, "stream"}


async def outcome(path: str, name: str) -> tuple[str, str]:
    """Return what became of a field, and the server's reason where it was refused."""
    probe = PROBES[path][name]
    plain = {"model": "fake", **_NEEDED[path], **probe.beside}
    before, _ = await _asked(path, plain)
    after, answer = await _asked(path, {**plain, name: probe.value})
    if answer.status_code == httpx.codes.BAD_REQUEST:
        return "refused", answer.json()["error"]["message"].partition(": ")[2]
    assert answer.status_code == httpx.codes.OK, answer.text
    if name == "model":
        return "works", "the served name; any other is a 404"
    return ("works", "") if before != after else ("accepted", "")


async def _asked(path: str, body: dict[str, Any]) -> tuple[Any, httpx.Response]:
    """Send a body; returns what the engine was asked and what came back, without what varies."""
    engine = FakeEngine()
    async with fake_service(engine) as client:
        answer = await client.post(path, json=body, headers={"X-Request-Id": "probe"})
    asked = [replace(request, request_id="") for request in engine.requests]
    text = answer.text
    if answer.headers["content-type"] == "application/json" and "choices" in answer.json():
        shown = answer.json()
        del shown["created"]
        for choice in shown["choices"]:
            for call in choice.get("message", {}).get("tool_calls", []):
                del call["id"]
        text = repr(shown)
    return (asked, text), answer


async def compatibility_page() -> str:
    """Return the whole page."""
    parts = [_HEAD]
    for path, probes in PROBES.items():
        parts.append(f"\n## `POST {path}`\n\n| field | what becomes of it |\n| --- | --- |\n")
        for name in sorted(probes):
            what, reason = await outcome(path, name)
            parts.append(f"| `{name}` | {what}{': ' + reason if reason else ''} |\n")
    return "".join(parts)


if __name__ == "__main__":
    import logging

    import structlog

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    print(asyncio.run(compatibility_page()), end="")  # noqa: T201  # this is what it is run for
