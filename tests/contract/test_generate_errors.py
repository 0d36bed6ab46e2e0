"""Every way a request can be wrong: its status, its shape, and that the next request works."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.api.schemas.generate import GenerateRequest
from tests.support.app_client import fake_service
from tests.support.fake_engine import UNKNOWN_ROLE, FakeEngine
from tests.support.logs import captured_log

HUGE = 10**30
NOT_INTEGERS: list[Any] = ["3", 3.0, 3.5, True, False, [], {}, float("nan"), float("inf"), HUGE]
BAD_VALUES: dict[str, list[Any]] = {
    "prompt": ["", 1, True, [], {}, 1.5, "\ud800", "a\udfffb"],
    "messages": [
        [],
        "hi",
        {},
        [1],
        [{}],
        [{"role": "user"}],
        [{"role": "", "content": "x"}],
        [{"role": 1, "content": "x"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": "\ud800"}],
        [{"role": "user", "content": "x", "name": "y"}],
        [{"role": UNKNOWN_ROLE, "content": "x"}],
    ],
    "max_new_tokens": [*NOT_INTEGERS, 0, -1, 4097],
    "temperature": ["0", True, None, -0.1, 100.5, float("nan"), float("inf"), [], HUGE, 10**400],
    "top_p": ["1", True, None, 0, 0.0, -1, 1.01, float("nan"), float("-inf")],
    "top_k": [*NOT_INTEGERS, None, -1],
    "seed": [*NOT_INTEGERS, -1, 2**63],
    "n": [*NOT_INTEGERS, None, 0, -1, 17],
    "stop": [1, True, {}, [1], [None], "", [""], ["x"] * 17, "x" * 1025, "\ud800", ["\ud800"]],
    "stream": [1, 0, "true", None, []],
    "ignore_eos": [1, "true", None],
    "explain": [1, "true", None],
    "max_capacity_prompt": [*NOT_INTEGERS, 0, -1, 1, 16, 1_048_577],
    "window_size": [*NOT_INTEGERS, 0, -1, 512, 1025],
    "kernel_size": [*NOT_INTEGERS, 0, -1, 2, 4, 1025],
    "pooling": ["", "AVG", "mean", 1, True, [], "\ud800"],
    "method": ["", "none", 1, True, {}, "\ud800"],
    "profile": ["", "QA", "chat", 1, True, []],
    "snapshot": ["", "on", "OFF", True, None, 0, []],
}
CASES = [
    pytest.param(field, value, id=f"{field}-{json.dumps(value)[:24]}")
    for field, values in BAD_VALUES.items()
    for value in values
]


def send(client: httpx.AsyncClient, content: bytes | AsyncIterator[bytes]) -> Any:
    """Post a body as it is, declared as JSON."""
    return client.post("/generate", content=content, headers={"Content-Type": "application/json"})


def check_shape(answer: httpx.Response) -> dict[str, Any]:
    """Check that an error has the documented shape and return its inside."""
    body = answer.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert {"type", "code", "message", "param"} <= set(error)
    assert error["message"]
    assert "Traceback" not in answer.text
    return error


def test_every_field_has_bad_values() -> None:
    """A new field of the request joins the table."""
    assert set(BAD_VALUES) == set(GenerateRequest.model_fields)


@pytest.mark.parametrize(("field", "value"), CASES)
async def test_bad_value_is_a_422_that_names_the_field(
    client: httpx.AsyncClient, engine: FakeEngine, field: str, value: Any
) -> None:
    """The field and the reason are named, nothing reaches the engine, the next request works."""
    body = {field: value} if field == "messages" else {"prompt": "a", field: value}
    answer = await send(client, json.dumps(body).encode("utf-8", "surrogatepass"))
    assert answer.status_code == 422, answer.text
    error = check_shape(answer)
    named = error["param"].partition(".")[0]
    related = {"window_size": "max_capacity_prompt"}  # capacity and window are one pair
    assert named in (field, related.get(field)), error
    assert field in error["message"]
    assert engine.requests == []
    assert (await client.post("/generate", json={"prompt": "a"})).status_code == 200


@pytest.mark.parametrize(
    ("body", "part"),
    [
        (b"", "empty"),
        (b"null", "JSON object"),
        (b"[]", "JSON object"),
        (b'"text"', "JSON object"),
        (b"1", "JSON object"),
        (b"{}", "exactly one"),
        (b'{"prompt": null}', "exactly one"),
        (b'{"prompt": "a", "messages": [{"role": "user", "content": "x"}]}', "exactly one"),
        (b"{", "not JSON"),
        (b'{"prompt": "a"} trailing', "not JSON"),
        (b'{"prompt": "a\n"}', "not JSON: Invalid control character at character 13"),
        (b'{"prompt": "a', "not JSON: Unterminated string starting at character 11"),
        (b'{"prompt": "a", "prompt": "b"}', "a field twice"),
        (b'{"prompt": "a", "x": {"y": 1, "y": 2}}', "a field twice"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        ('{"prompt": "a"}'.encode("utf-16"), "not UTF-8"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        (b'{"prompt": "a", "temperature": NaN}', "temperature: must be a finite"),
        (b'{"prompt": "a", "temperature": -Infinity}', "temperature: must be a finite"),
        (b'{"prompt": NaN}', "prompt: must be"),
        (b'{"prompt": "a", "temperature": 1e400}', "finite"),
        (b'{"prompt": "a", "seed": ' + b"1" * 5_000 + b"}", "seed"),
        (b'{"prompt": "a", "top_p": ' + b"1" * 5_000 + b"}", "top_p"),
        (b'{"prompt": "a", "top_p": -' + b"1" * 5_000 + b"}", "top_p"),
        (b'{"prompt": "a", "seed": ' + b"1" * 4_000 + b"}", "seed"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}", "prompt"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"prompt": "a", "max_tokens": 5}', "unknown field"),
        (b'{"prompt": "a", "body": 5}', "body: unknown field"),
        (b'{"prompt": "a", "windowsize": 5}', "did you mean window_size?"),
        (b'{"prompt": "a", "\\ud800": 5}', "Unicode"),
        (b'{"prompt": "a", "' + b"x" * 100_000 + b'": 5}', "unknown field"),
    ],
    ids=lambda value: str(value[:30]),
)
async def test_bad_body_is_a_422_with_the_reason(
    client: httpx.AsyncClient, body: bytes, part: str
) -> None:
    """What is not a request at all is refused cleanly, however odd."""
    answer = await send(client, body)
    assert answer.status_code == 422, answer.text
    assert part in check_shape(answer)["message"]
    assert len(answer.content) < 2_000
    assert (await client.post("/generate", json={"prompt": "a"})).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "a", "stop": [' + b"1," * 200_000 + b"1]}",
        b'{"messages": [' + b"{}," * 200_000 + b"{}]}",
        b"{" + b",".join(b'"f%d": 1' % number for number in range(50_000)) + b"}",
    ],
    ids=["stop", "messages", "fields"],
)
async def test_many_problems_cost_no_more_than_one(client: httpx.AsyncClient, body: bytes) -> None:
    """A body full of mistakes is refused at the first, not after listing all of them."""
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    answer = await send(client, body)
    assert answer.status_code == 422
    assert len(answer.content) < 2_000
    assert loop.time() - started_s < 2


async def test_all_problems_are_listed(client: httpx.AsyncClient) -> None:
    """Who made three mistakes learns of three."""
    answer = await client.post("/generate", json={"prompt": "a", "n": "1", "seed": 1.5, "x": 1})
    error = check_shape(answer)
    assert {problem["param"] for problem in error["errors"]} == {"n", "seed", "x"}


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "application/jsonx"},
        {"Content-Type": ""},
        {},
        [("Content-Type", "application/json"), ("Content-Type", "text/plain")],
    ],
)
async def test_other_content_types_are_415(client: httpx.AsyncClient, headers: Any) -> None:
    """Only JSON that says so is read."""
    answer = await client.post("/generate", content=b'{"prompt": "a"}', headers=headers)
    assert answer.status_code == 415
    assert "application/json" in check_shape(answer)["message"]


@pytest.mark.parametrize("route", ["/generate", "/v1/completions"])
async def test_encoded_body_is_415(client: httpx.AsyncClient, route: str) -> None:
    """Nothing is unpacked here; taking it as it is would read noise."""
    answer = await client.post(
        route,
        content=gzip.compress(b'{"prompt": "a"}'),
        headers={"Content-Type": "application/json", "Content-Encoding": "gzip"},
    )
    assert answer.status_code == 415
    assert "Content-Encoding" in check_shape(answer)["message"]


@pytest.mark.parametrize("value", ["application/json; charset=utf-8", "Application/JSON"])
async def test_spellings_of_the_json_type_are_accepted(
    client: httpx.AsyncClient, value: str
) -> None:
    """Parameters and case do not matter."""
    answer = await client.post(
        "/generate", content=b'{"prompt": "a"}', headers={"Content-Type": value}
    )
    assert answer.status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_too_long_is_a_400_with_both_numbers(
    client: httpx.AsyncClient, stream: bool
) -> None:
    """The caller learns how long the prompt is and what fits."""
    body = {"prompt": "w " * 2_040, "max_new_tokens": 10, "stream": stream}
    answer = await client.post("/generate", json=body)
    error = check_shape(answer)
    assert (answer.status_code, error["code"]) == (400, "prompt_too_long")
    assert (error["num_prompt_tokens"], error["max_model_len"]) == (2_040, 2_048)
    assert error["param"] == "prompt"


@pytest.mark.parametrize("stream", [False, True])
async def test_request_that_can_never_fit_is_a_400_with_both_sizes(
    client: httpx.AsyncClient, engine: FakeEngine, stream: bool
) -> None:
    """Waiting would not help: the caller learns what it needs and what there is."""
    body = {"prompt": "a", "max_new_tokens": 1_601, "stream": stream}
    answer = await client.post("/generate", json=body)
    error = check_shape(answer)
    assert (answer.status_code, error["code"]) == (400, "request_too_large")
    assert (error["needed_bytes"], error["available_bytes"]) == (102_464, 102_400)
    assert error["param"] == "max_new_tokens"
    assert "retry-after" not in answer.headers
    assert engine.requests == []
    assert (
        await client.post("/generate", json=body | {"max_new_tokens": 1_600})
    ).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_full_queue_is_a_429_with_retry_after(
    client: httpx.AsyncClient, engine: FakeEngine, stream: bool
) -> None:
    """The caller is told to come back, rounded up to whole seconds."""
    engine.behaviour.queue_full = True
    answer = await client.post("/generate", json={"prompt": "a", "stream": stream})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
    assert check_shape(answer)["code"] == "queue_full"


async def test_failed_generation_is_a_500_and_the_next_works(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    """A failure of the model is told without its text; other requests are untouched."""
    engine.behaviour.fail_after = 1
    answer = await client.post("/generate", json={"prompt": "a b"})
    assert answer.status_code == 500
    assert check_shape(answer)["code"] == "generation_failed"
    assert "the fake was told" not in answer.text
    engine.behaviour.fail_after = None
    assert (await client.post("/generate", json={"prompt": "a"})).status_code == 200


async def test_answer_cut_by_shutdown_is_a_503(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    """Half an answer is no answer: the caller can try another replica."""
    engine.behaviour.abort_after = 1
    answer = await client.post("/generate", json={"prompt": "a b"})
    assert (answer.status_code, check_shape(answer)["code"]) == (503, "engine_stopped")


async def test_unknown_exception_is_a_bare_500(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    """A bug shows neither its text nor its trace."""
    engine.behaviour.crash_on_submit = True
    # As served: structlog's own log draws a picture of an error, which takes seconds.
    with captured_log():
        answer = await client.post("/generate", json={"prompt": "secret words"})
    assert answer.status_code == 500
    assert check_shape(answer)["code"] == "internal_error"
    assert "secret" not in answer.text
    assert answer.headers["x-request-id"].startswith("req_")


async def test_unknown_path_and_method_have_the_same_shape(client: httpx.AsyncClient) -> None:
    """404 and 405 are errors like any other."""
    missing = await client.get("/nothing")
    wrong = await client.get("/generate")
    assert (missing.status_code, check_shape(missing)["code"]) == (404, "not_found")
    assert (wrong.status_code, check_shape(wrong)["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_large_body_is_a_413(engine: FakeEngine, is_chunked: bool) -> None:
    """The limit holds for declared and for undeclared lengths; a body at the limit passes."""
    frame = len('{"prompt": ""}')

    async def chunks(size: int) -> AsyncIterator[bytes]:
        yield b'{"prompt": "'
        for start in range(0, size, 500):
            yield b"x" * min(500, size - start)
        yield b'"}'

    async with fake_service(engine, max_body_bytes=2_000) as client:
        for size, status in ((2_000 - frame, 200), (2_001 - frame, 413)):
            whole = b"".join([chunk async for chunk in chunks(size)])
            answer = await send(client, chunks(size) if is_chunked else whole)
            assert answer.status_code == status
    assert check_shape(answer)["code"] == "body_too_large"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
bodies = st.one_of(
    st.binary(max_size=60),
    json_values.map(lambda value: json.dumps(value).encode("utf-8", "surrogatepass")),
    st.dictionaries(st.sampled_from(sorted(GenerateRequest.model_fields)), json_values).map(
        lambda value: json.dumps({"prompt": "a b", **value}).encode("utf-8", "surrogatepass")
    ),
)


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(body=bodies)
async def test_no_body_is_a_server_error(body: bytes) -> None:
    """Whatever is sent, the answer is an answer or a refusal with the documented shape."""
    async with fake_service(FakeEngine()) as client:
        answer = await send(client, body)
        assert answer.status_code in (200, 400, 422), answer.text
        if answer.status_code != 200:
            check_shape(answer)
