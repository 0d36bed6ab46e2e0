"""OpenAI's routes, driven by OpenAI's own client and by bodies it would never send."""

import json
from typing import Any

import httpx
import openai
import pytest

from app.api.schemas.openai import MAX_PROMPTS, MAX_TOKEN_IDS, CompletionRequest
from app.main import create_app
from snapkv_core import MAX_BIASED_TOKENS, CompressionConfig
from tests.contract.test_generate_errors import BAD_VALUES, NOT_INTEGERS, check_shape
from tests.support.app_client import running, settings_for_tests
from tests.support.fake_engine import FakeEngine

LONG_PROMPT = " ".join(f"w{index}" for index in range(600))
PATH = "/v1/completions"
NO_NEUTRAL_NUMBER: list[Any] = ["1", True, False, [], {}, float("nan"), float("inf")]

#: Fields that mean on this route what they mean on `/generate`, apart from null.
SAME = ("top_k", "seed", "stop", "ignore_eos", "method", "max_capacity_prompt", "window_size")
SAME_OR_NULL = ("temperature", "top_p", "n", "stream")
BAD_SCHEMAS: list[Any] = [
    *(None, [], {}, {"name": ""}, {"name": "a b"}, {"name": 1}, {"name": "a", "x": 1}),
    *({"name": "a", "schema": []}, {"name": "a", "schema": True}, {"name": "a", "strict": 1}),
]
BAD: dict[str, list[Any]] = {
    **{name: BAD_VALUES[name] for name in (*SAME, "kernel_size", "pooling", "profile", "snapshot")},
    **{name: [v for v in BAD_VALUES[name] if v is not None] for name in SAME_OR_NULL},
    "model": [None, 1, [], "\ud800", True],
    "prompt": [
        *("", None, 1, [], {}, "\ud800", "a\udfffb", True, 1.5),
        *([""], ["a", ""], [[1], []], [[]], [["a"]], ["a", 1], [1, "a"], ["\ud800"]),
        *(["a", None], ["a", ["b"]], [[1], [-1]], ["a"] * (MAX_PROMPTS + 1)),
        *([1, -1], [1.0], [True], [None], [[1, [2]]]),
    ],
    "max_tokens": [*NOT_INTEGERS, 0, -1, 4_097],
    "stream_options": [
        True,
        1,
        "x",
        [],
        {"include_usage": 1},
        {"x": True},
        {"include_usage": None},
    ],
    "user": [1, [], {}, "\ud800"],
    "best_of": [0, 2, -1, *NO_NEUTRAL_NUMBER],
    "echo": [0, 1, "false", []],
    "explain": BAD_VALUES["explain"],
    "frequency_penalty": [2.1, -2.1, "0", *NO_NEUTRAL_NUMBER],
    "presence_penalty": [2.1, -2.1, "0", *NO_NEUTRAL_NUMBER],
    "repetition_penalty": [0, 1.1, *NO_NEUTRAL_NUMBER],
    "min_p": [0.1, *NO_NEUTRAL_NUMBER],
    "min_tokens": [1, *NO_NEUTRAL_NUMBER],
    "logit_bias": [
        *([], 0, "", False, {"a": 1}, {"": 1}, {"-1": 1}, {"1.0": 1}, {"٣": 1}, {"9" * 10: 1}),
        *({"1": "1"}, {"1": None}, {"1": True}, {"1": 100.1}, {"1": -101}, {"1": float("nan")}),
        *({"1": 1, "01": 1}, {str(token_id): 1 for token_id in range(MAX_BIASED_TOKENS + 1)}),
    ],
    "logprobs": [-1, 21, 1.0, True, False, ""],
    "response_format": [
        *(True, "json_object", [], {}, {"type": "yaml"}, {"type": "text", "x": 1}, {"type": None}),
        *({"type": "json_schema"}, {"type": "json_object", "json_schema": {"name": "a"}}),
        *({"type": "json_schema", "json_schema": given} for given in BAD_SCHEMAS),
    ],
    "suffix": ["", "x", 0, False, "\ud800"],
}
CASES = [
    pytest.param(field, value, id=f"{field}-{json.dumps(value)[:24]}-{number}")
    for field, values in BAD.items()
    for number, value in enumerate(values)
]


def send(client: httpx.AsyncClient, body: dict[str, Any], path: str = PATH) -> Any:
    """Post a body as it is, half surrogate pairs and infinities included."""
    content = json.dumps(body).encode("utf-8", "surrogatepass")
    return client.post(path, content=content, headers={"Content-Type": "application/json"})


async def test_answer_has_exactly_openais_fields_and_two_more(client: httpx.AsyncClient) -> None:
    """`kv_cache` and `snapshot` are the only fields that OpenAI's answer does not have."""
    answer = await client.post(PATH, json={"model": "fake", "prompt": LONG_PROMPT, "max_tokens": 2})
    assert answer.status_code == 200
    body = answer.json()
    created = body.pop("created")
    assert isinstance(created, int)
    assert created > 1_700_000_000
    assert body == {
        "id": answer.headers["x-request-id"],
        "object": "text_completion",
        "model": "fake",
        "choices": [{"index": 0, "text": " w0 w1", "logprobs": None, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 600, "completion_tokens": 2, "total_tokens": 602},
        "kv_cache": {
            "method": "snapkv",
            "original_entries": 600,
            "compressed_entries": 512.0,
            "compression_ratio": 600 / 512,
            "original_bytes": 600 * 64,
            "compressed_bytes": 512 * 64,
            "kept_attention_mass": 0.9,
            "skipped": None,
        },
        "snapshot": "off",
    }


async def test_openais_client_gets_the_answer(
    openai_client: openai.AsyncOpenAI, engine: FakeEngine
) -> None:
    """Every field it can send reaches the engine, our own as extra fields of the body."""
    answer = await openai_client.completions.create(
        model="fake",
        prompt="a b c",
        max_tokens=2,
        temperature=0.5,
        top_p=0.9,
        n=2,
        stop=["x", "y"],
        seed=11,
        user="somebody",
        extra_body={
            "top_k": 3,
            "ignore_eos": True,
            "max_capacity_prompt": 100,
            "window_size": 8,
            "kernel_size": 5,
            "pooling": "avg",
            "method": "snapkv",
        },
        extra_headers={"X-Request-Timeout": "30"},
    )
    assert [(choice.text, choice.finish_reason) for choice in answer.choices] == [
        (" 0:a 0:b", "length"),
        (" 1:a 1:b", "length"),
    ]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 4)
    assert answer.model_extra is not None
    assert answer.model_extra["kv_cache"]["skipped"] == "prompt_fits_capacity"
    (request,) = engine.requests
    sampling = request.sampling
    assert (request.prompt, request.timeout_s, request.explain) == ("a b c", 30.0, False)
    assert (sampling.max_new_tokens, sampling.temperature, sampling.top_p) == (2, 0.5, 0.9)
    assert (sampling.n, sampling.stop, sampling.seed) == (2, ("x", "y"), 11)
    assert (sampling.top_k, sampling.ignore_eos) == (3, True)
    assert request.compression == CompressionConfig("snapkv", 100, 8, 5, "avg")


@pytest.mark.parametrize(
    ("prompt", "taken"),
    [("a b", "a b"), (["a b"], "a b"), ([5, 0, 7], (5, 0, 7)), ([[5, 0, 7]], (5, 0, 7))],
)
async def test_one_prompt_comes_in_many_forms(
    openai_client: openai.AsyncOpenAI, engine: FakeEngine, prompt: Any, taken: object
) -> None:
    """Libraries on top of the client send lists of one, and token ids."""
    answer = await openai_client.completions.create(model="fake", prompt=prompt, max_tokens=1)
    assert len(answer.choices) == 1
    assert engine.requests[0].prompt == taken


async def test_ids_without_end_are_refused(client: httpx.AsyncClient) -> None:
    too_many = [1] * (MAX_TOKEN_IDS + 1)
    answer = await client.post(PATH, json={"model": "fake", "prompt": too_many})
    assert (answer.status_code, check_shape(answer)["param"]) == (400, "prompt")


@pytest.mark.parametrize("is_null", [False, True])
async def test_defaults_are_openais_apart_from_the_length(
    client: httpx.AsyncClient, engine: FakeEngine, is_null: bool
) -> None:
    """Temperature 1 unlike `/generate`; null and leaving out mean the same."""
    names = ("max_tokens", "temperature", "top_p", "n", "stop", "seed", "stream", "profile")
    nulls = dict.fromkeys(names) if is_null else {}
    answer = await client.post(PATH, json={"model": "fake", "prompt": "a", **nulls})
    assert answer.status_code == 200, answer.text
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.n) == (1.0, 1.0, 1)
    assert (sampling.max_new_tokens, sampling.stop, sampling.seed) == (None, (), None)
    assert engine.requests[0].compression == CompressionConfig("snapkv", 512, 16, 15, "max")


async def test_profile_is_taken(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    """A named set of knobs works here as on `/generate`."""
    body = {"model": "fake", "prompt": "a", "profile": "rag", "window_size": 48}
    await client.post(PATH, json=body)
    assert engine.requests[0].compression == CompressionConfig("snapkv", 2048, 48, 15, "max")


async def test_values_that_ask_for_nothing_are_accepted(client: httpx.AsyncClient) -> None:
    """What clients and load tools send out of habit is no reason to refuse them."""
    for habits in (
        {
            "best_of": 1,
            "echo": False,
            "frequency_penalty": 0,
            "logit_bias": {},
            "logprobs": None,
            "min_p": 0,
            "min_tokens": 0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "suffix": None,
            "user": "u",
        },
        dict.fromkeys(("best_of", "echo", "frequency_penalty", "logit_bias", "user"), None),
    ):
        answer = await client.post(PATH, json={"model": "fake", "prompt": "a", **habits})
        assert answer.status_code == 200, answer.text


async def test_models_are_listed_to_openais_client(openai_client: openai.AsyncOpenAI) -> None:
    """The one model has the name that completions take."""
    models = (await openai_client.models.list()).data
    assert [(model.id, model.object, model.owned_by) for model in models] == [
        ("fake", "model", "snapkv")
    ]
    assert models[0].created > 1_700_000_000
    assert models[0].model_extra == {"max_model_len": 2_048}
    assert await openai_client.models.retrieve("fake") == models[0]
    with pytest.raises(openai.NotFoundError) as caught:
        await openai_client.models.retrieve("gpt-9")
    assert caught.value.code == "model_not_found"


async def test_name_of_a_model_may_hold_slashes(engine: FakeEngine) -> None:
    """Hub ids do."""
    engine.model_name = "owner/name"
    app = create_app(settings_for_tests(), engine)
    async with running(app) as client:
        for path in ("owner/name", "owner%2Fname"):
            assert (await client.get(f"/v1/models/{path}")).json()["id"] == "owner/name"
        answer = await client.post(PATH, json={"model": "owner/name", "prompt": "a"})
        assert answer.status_code == 200


@pytest.mark.parametrize("name", ["", "other", "FAKE", "x" * 500, "a\"\n'b"])
async def test_other_model_is_a_404(
    client: httpx.AsyncClient, engine: FakeEngine, name: str
) -> None:
    """A client that wants another model does not get this one's answer."""
    answer = await client.post(PATH, json={"model": name, "prompt": "a"})
    error = check_shape(answer)
    assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert len(answer.content) < 500
    assert engine.requests == []


def test_every_field_has_bad_values() -> None:
    """A new field of the request joins the table."""
    assert set(BAD) == set(CompletionRequest.model_fields)


@pytest.mark.parametrize(("field", "value"), CASES)
async def test_bad_value_is_a_400_that_names_the_field(
    client: httpx.AsyncClient, engine: FakeEngine, field: str, value: Any
) -> None:
    """Never a 422, never ignored; the next request works."""
    stream = {"stream": True} if field == "stream_options" else {}
    answer = await send(client, {"model": "fake", "prompt": "a", **stream, field: value})
    assert answer.status_code == 400, answer.text
    error = check_shape(answer)
    named = error["param"].partition(".")[0]
    related = {"window_size": "max_capacity_prompt"}  # capacity and window are one pair
    assert named in (field, related.get(field)), error
    assert field in error["message"]
    assert error["type"] == "invalid_request_error"
    assert engine.requests == []
    assert (await send(client, {"model": "fake", "prompt": "a"})).status_code == 200


@pytest.mark.parametrize(
    ("body", "param", "part"),
    [
        ({}, "model", "model: is missing; prompt: is missing"),
        ({"model": "fake"}, "prompt", "is missing"),
        ({"prompt": "a"}, "model", "is missing"),
        ({"model": "fake", "prompt": "a", "max_new_tokens": 5}, "max_new_tokens", "unknown field"),
        ({"model": "fake", "prompt": "a", "min_p": 0.5}, "min_p", "is not supported"),
        ({"model": "fake", "messages": []}, "prompt", "messages: unknown field"),
        ({"model": "fake", "prompt": "a", "max_token": 5}, "max_token", "did you mean max_tokens?"),
        (
            {
                "model": "fake",
                "prompt": "a",
                "response_format": {"type": "json_object"},
                "stop": "x",
            },
            "stop",
            "cannot be used with response_format",
        ),
        ({"model": "fake", "prompt": "a", "best_of": 3}, "best_of", "send null or 1"),
        (
            {"model": "fake", "prompt": "a", "stream_options": {"include_usage": True}},
            "stream_options",
            "only for stream: true",
        ),
        (
            {"model": "fake", "prompt": "a", "max_tokens": 4_097},
            "max_tokens",
            "max_tokens: must be at most 4096",
        ),
    ],
)
async def test_refusal_speaks_of_this_routes_fields(
    client: httpx.AsyncClient, body: dict[str, Any], param: str, part: str
) -> None:
    """Names and hints are those of the request that was sent, not those of `/generate`."""
    answer = await client.post(PATH, json=body)
    error = check_shape(answer)
    assert (answer.status_code, error["param"]) == (400, param)
    assert part in error["message"]


@pytest.mark.parametrize(
    "content", [b"", b"null", b"[]", b"{", b'{"model": "\xff"}', b"[" * 10_000]
)
async def test_body_that_is_no_request_is_a_400(client: httpx.AsyncClient, content: bytes) -> None:
    """What is not even JSON has the status that OpenAI's clients expect, too."""
    answer = await client.post(PATH, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    check_shape(answer)


async def test_errors_reach_openais_client_as_its_own(
    openai_client: openai.AsyncOpenAI, engine: FakeEngine
) -> None:
    """Its exceptions carry our code and the field."""

    async def error_of(kind: type[openai.APIStatusError], **fields: Any) -> Any:
        with pytest.raises(kind) as caught:
            await openai_client.completions.create(**{"model": "fake", "prompt": "a", **fields})
        return caught.value

    bad = await error_of(openai.BadRequestError, temperature=101)
    assert (bad.code, bad.param, bad.type) == (
        "invalid_value",
        "temperature",
        "invalid_request_error",
    )
    knob = await error_of(openai.BadRequestError, extra_body={"kernel_size": 4})
    assert (knob.param, "must be odd" in knob.message) == ("kernel_size", True)
    long = await error_of(openai.BadRequestError, prompt="w " * 2_040, max_tokens=10)
    assert (long.code, long.body["num_prompt_tokens"]) == ("prompt_too_long", 2_040)
    large = await error_of(openai.BadRequestError, max_tokens=1_700)
    assert (large.code, large.param) == ("request_too_large", "max_tokens")
    assert (large.body["needed_bytes"], large.body["available_bytes"]) == (108_800, 102_400)
    assert "max_new_tokens" not in large.message
    assert "max_tokens or n" in large.message
    assert (await error_of(openai.NotFoundError, model="other")).code == "model_not_found"
    engine.behaviour.queue_full = True
    assert (await error_of(openai.RateLimitError)).response.headers["retry-after"] == "3"
    engine.behaviour.queue_full = False
    engine.behaviour.fail_after = 0
    assert (await error_of(openai.InternalServerError)).code == "generation_failed"


async def test_routes_are_described(client: httpx.AsyncClient) -> None:
    """The schema knows the bodies, the header and the statuses."""
    schema = (await client.get("/openapi.json")).json()
    operation = schema["paths"][PATH]["post"]
    assert {"200", "400", "404", "413", "415", "429", "500", "503", "504"} <= set(
        operation["responses"]
    )
    assert [parameter["name"] for parameter in operation["parameters"]] == ["x-request-timeout"]
    assert "/v1/models" in schema["paths"]
