"""`/tokenize` and `/detokenize`: what goes in, what comes out, and every way to be refused."""

import json
from typing import Any

import httpx
import pytest

from app.api.schemas.tokenize import DetokenizeBody, TokenizeBody
from tests.contract.test_generate_errors import check_shape
from tests.support.app_client import fake_service
from tests.support.fake_engine import FakeBehaviour, FakeEngine

MESSAGES = [{"role": "user", "content": "one two"}, {"role": "assistant", "content": "three"}]
NOT_BOOLEANS: list[Any] = [1, 0, "true", []]
BAD_TOKENIZE: dict[str, list[Any]] = {
    "model": [1, "\ud800"],
    "prompt": [1, True, ["a"], {}, "\ud800"],
    "messages": [[], "hi", [{"role": "user"}], [{"role": "user", "content": "x", "name": "y"}]],
    "add_special_tokens": NOT_BOOLEANS,
    "add_generation_prompt": [*NOT_BOOLEANS, True, False],
    "return_token_strs": [*NOT_BOOLEANS, None],
    "return_offsets": [*NOT_BOOLEANS, None],
    "chat_template": ["{{ messages }}"],
}
BAD_DETOKENIZE: dict[str, list[Any]] = {
    "model": [1],
    "tokens": [None, 1, "1", [True], [1.0], ["1"], [[1]]],
    "skip_special_tokens": [True],
}
CASES = [
    pytest.param(path, base, field, value, id=f"{path}-{field}-{json.dumps(value)[:24]}")
    for path, base, table in (
        ("/tokenize", {"prompt": "a"}, BAD_TOKENIZE),
        ("/detokenize", {"tokens": [1]}, BAD_DETOKENIZE),
    )
    for field, values in table.items()
    for value in values
]


def test_every_field_has_bad_values() -> None:
    assert set(TokenizeBody.model_fields) <= set(BAD_TOKENIZE)
    assert set(DetokenizeBody.model_fields) <= set(BAD_DETOKENIZE)


async def test_a_prompt_is_counted(client: httpx.AsyncClient) -> None:
    """The fields are those of other servers' routes of this name, and no more."""
    answer = await client.post("/tokenize", json={"prompt": "one  two three"})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {
        "count": 3,
        "max_model_len": 2_048,
        "tokens": [0, 1, 2],
        "token_strs": None,
    }


async def test_strings_and_offsets_come_when_they_are_asked_for(client: httpx.AsyncClient) -> None:
    body = {"prompt": " one  two", "return_token_strs": True, "return_offsets": True}
    answer = (await client.post("/tokenize", json={"model": "fake", **body})).json()
    assert answer["token_strs"] == ["one", "two"]
    assert answer["text"] == body["prompt"]
    assert answer["offsets"] == [[1, 4], [6, 9]]


async def test_messages_are_rendered_first(client: httpx.AsyncClient) -> None:
    body = {"messages": MESSAGES, "add_generation_prompt": False, "return_offsets": True}
    answer = (await client.post("/tokenize", json=body)).json()
    assert (answer["count"], answer["text"]) == (3, "one two\nthree")


async def test_tokens_become_text(client: httpx.AsyncClient) -> None:
    answer = await client.post("/detokenize", json={"model": "fake", "tokens": [7, 8]})
    assert (answer.status_code, answer.json()) == (200, {"prompt": "7 8"})


async def test_nothing_has_no_tokens(client: httpx.AsyncClient) -> None:
    assert (await client.post("/tokenize", json={"prompt": ""})).json()["count"] == 0
    assert (await client.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


@pytest.mark.parametrize(("path", "base", "field", "value"), CASES)
async def test_bad_value_is_a_422_that_names_the_field(
    client: httpx.AsyncClient, path: str, base: dict[str, Any], field: str, value: Any
) -> None:
    body = {field: value} if field == "messages" else {**base, field: value}
    content = json.dumps(body).encode("utf-8", "surrogatepass")
    answer = await client.post(path, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422, answer.text
    error = check_shape(answer)
    assert error["param"].partition(".")[0] == field
    assert (await client.post(path, json=base)).status_code == 200


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": MESSAGES}])
async def test_exactly_one_of_prompt_and_messages(
    client: httpx.AsyncClient, body: dict[str, Any]
) -> None:
    answer = await client.post("/tokenize", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (422, "prompt")


@pytest.mark.parametrize(
    ("path", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})]
)
async def test_another_model_is_a_404(
    client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    answer = await client.post(path, json={**body, "model": "other"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


async def test_a_misspelt_field_is_suggested(client: httpx.AsyncClient) -> None:
    answer = await client.post("/tokenize", json={"prompt": "a", "return_offset": True})
    assert "did you mean return_offsets?" in answer.json()["error"]["message"]


async def test_too_many_texts_are_a_429() -> None:
    engine = FakeEngine(behaviour=FakeBehaviour(queue_full=True))
    async with fake_service(engine) as client:
        answer = await client.post("/tokenize", json={"prompt": "a"})
    assert (answer.status_code, answer.headers["Retry-After"]) == (429, "3")


async def test_a_body_that_is_too_large_is_a_413(engine: FakeEngine) -> None:
    async with fake_service(engine, max_body_bytes=1_024) as client:
        for path, body in (
            ("/tokenize", {"prompt": "a" * 1_024}),
            ("/detokenize", {"tokens": [1] * 512}),
        ):
            assert (await client.post(path, json=body)).status_code == 413
