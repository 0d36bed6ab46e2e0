"""`POST /generate` without streaming: the answer's fields, and what reaches the engine."""

import base64

import httpx

from snapkv_core import ChatMessage, CompressionConfig
from tests.support.fake_engine import FakeEngine

LONG_PROMPT = " ".join(f"w{index}" for index in range(600))


async def test_answer_has_exactly_the_documented_fields(client: httpx.AsyncClient) -> None:
    """Clients may rely on these names and on no other."""
    answer = await client.post("/generate", json={"prompt": LONG_PROMPT, "max_new_tokens": 2})
    assert answer.status_code == 200
    assert answer.json() == {
        "id": answer.headers["x-request-id"],
        "model": "fake",
        "text": " w0 w1",
        "finish_reason": "length",
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
        "timings": {
            "queue_ms": 1.0,
            "prefill_ms": 20.0,
            "decode_ms": 30.0,
            "time_to_first_token_ms": 21.0,
            "total_ms": 51.0,
        },
    }


async def test_short_prompt_says_why_nothing_was_dropped(client: httpx.AsyncClient) -> None:
    """A prompt that fits is reported as skipped, with ratio 1."""
    answer = await client.post("/generate", json={"prompt": "one two", "max_new_tokens": 5})
    kv_cache = answer.json()["kv_cache"]
    assert kv_cache["skipped"] == "prompt_fits_capacity"
    assert kv_cache["compression_ratio"] == 1.0
    assert answer.json()["finish_reason"] == "stop"


async def test_several_choices_are_listed(client: httpx.AsyncClient) -> None:
    """With n above 1 every answer is in `choices`, and `text` is the first."""
    answer = (await client.post("/generate", json={"prompt": "a b", "n": 2})).json()
    assert answer["text"] == " 0:a 0:b"
    assert answer["choices"] == [
        {"index": 0, "text": " 0:a 0:b", "finish_reason": "stop"},
        {"index": 1, "text": " 1:a 1:b", "finish_reason": "stop"},
    ]
    assert answer["usage"]["completion_tokens"] == 4


async def test_explain_lists_kept_counts(client: httpx.AsyncClient) -> None:
    """`explain` adds per-token counts, per layer as base64 of one byte per token."""
    answer = (await client.post("/generate", json={"prompt": "a b c", "explain": True})).json()
    explain = answer["explain"]
    assert explain["num_kv_heads"] == 2
    assert explain["kept_counts"] == [4, 4, 4]
    assert [base64.b64decode(row) for row in explain["layer_kept_counts"]] == [b"\2\2\2"] * 2


async def test_every_field_reaches_the_engine(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    """No field is accepted and ignored."""
    body = {
        "messages": [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}],
        "max_new_tokens": 7,
        "temperature": 1,
        "top_p": 0.5,
        "top_k": 3,
        "seed": 11,
        "n": 2,
        "stop": ["x", "y"],
        "ignore_eos": True,
        "method": "snapkv",
        "max_capacity_prompt": 100,
        "window_size": 8,
        "kernel_size": 5,
        "pooling": "avg",
        "explain": True,
    }
    answer = await client.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    (request,) = engine.requests
    assert request.prompt == (ChatMessage("system", "be"), ChatMessage("user", "hi"))
    sampling = request.sampling
    assert (sampling.max_new_tokens, sampling.temperature, sampling.top_p) == (7, 1.0, 0.5)
    assert (sampling.top_k, sampling.seed, sampling.n) == (3, 11, 2)
    assert (sampling.stop, sampling.ignore_eos) == (("x", "y"), True)
    assert request.compression == CompressionConfig("snapkv", 100, 8, 5, "avg")
    assert request.explain


async def test_single_stop_string_and_nulls_mean_what_they_say(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    """`stop` may be one string, and null is the same as leaving an optional field out."""
    body = {"prompt": "a", "stop": "END", "seed": None, "max_new_tokens": None, "profile": None}
    assert (await client.post("/generate", json=body)).status_code == 200
    assert engine.requests[0].sampling.stop == ("END",)
    assert engine.requests[0].sampling.max_new_tokens is None


async def test_profile_is_the_base_that_explicit_knobs_override(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    """A profile replaces the server's default; a knob beside it wins."""
    await client.post("/generate", json={"prompt": "a", "profile": "rag", "window_size": 48})
    assert engine.requests[0].compression == CompressionConfig("snapkv", 2048, 48, 15, "max")


async def test_request_id_is_taken_over_and_kept_unique(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    """A valid X-Request-Id names the request; an unusual one is replaced."""
    named = await client.post(
        "/generate", json={"prompt": "a"}, headers={"X-Request-Id": "job-1.A_b"}
    )
    assert named.json()["id"] == named.headers["x-request-id"] == "job-1.A_b"
    for bad in ("a b", "x" * 129, "a/b", 'a"b', ""):
        answer = await client.post("/generate", json={"prompt": "a"}, headers={"X-Request-Id": bad})
        assert answer.headers["x-request-id"].startswith("req_")
    assert len({request.request_id for request in engine.requests}) == 6


async def test_openapi_describes_the_route(client: httpx.AsyncClient) -> None:
    """The schema is served and knows the body, the answer and the errors."""
    schema = (await client.get("/openapi.json")).json()
    operation = schema["paths"]["/generate"]["post"]
    assert {"200", "400", "413", "415", "422", "429", "503"} <= set(operation["responses"])
    properties = schema["components"]["schemas"]["GenerateRequest"]["properties"]
    assert properties["pooling"]["enum"] == ["avg", "max", None]
