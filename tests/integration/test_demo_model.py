"""The demo model: its tokenizer, its greedy answers, and decoding after compression."""

from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from snapkv_core import ChatMessage, CompressionConfig, Engine, EngineConfig
from snapkv_core.config import Pooling
from tests.oracles.masked_decode import Knobs, MaskedDecoder
from tests.support.engines import (
    FULL,
    ask,
    drain,
    ids_of,
    make_request,
    run_together,
    text_of,
)
from tests.support.essays import cache_dir, load_essays
from tests.support.models import greedy_reference

pytestmark = [pytest.mark.demo, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Load the demo model in float32, as the service would."""
    config = EngineConfig(model="demo", cache_dir=str(cache_dir()), device="cpu", dtype="float32")
    return Engine.load(config)


@cache
def reference_model() -> Any:
    """Load the demo model a second time, untouched by the engine."""
    from snapkv_core.models.demo import ensure_demo_model

    folder = ensure_demo_model(str(cache_dir()))
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def essay_ids(engine: Engine, num_tokens: int, start: int = 0) -> tuple[int, ...]:
    """Cut a prompt of exactly so many tokens out of the essays."""
    ids = engine.tokenizer.encode(load_essays()[start : start + num_tokens * 8])
    assert len(ids) >= num_tokens
    return tuple(ids[:num_tokens])


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        (
            "Hello world, this is a test.\n\n  x = 29093 naïve 日本語 🎉",
            [
                *(
                    19556,
                    905,
                    28,
                    451,
                    314,
                    253,
                    1028,
                    30,
                    8866,
                    1792,
                    446,
                    216,
                    34,
                    41,
                    32,
                    41,
                    35,
                ),
                *(15486, 46494, 17097, 241, 115, 40993, 179, 120, 248, 15107, 232, 227),
            ],
        ),
        ("It's 1900, isn't it?", [1589, 506, 216, 33, 41, 32, 32, 28, 3247, 982, 357, 47]),
    ],
)
def test_tokenizer_gives_the_ids_that_llama_cpp_gives(
    engine: Engine, text: str, ids: list[int]
) -> None:
    assert engine.tokenizer.encode(text) == ids
    assert engine.tokenizer.decode(ids) == text


def test_control_tokens_are_one_token_each_and_end_an_answer(engine: Engine) -> None:
    text = "<|im_start|>user\nhi<|im_end|>\n"
    assert engine.tokenizer.encode(text) == [1, 4093, 198, 6004, 2, 198]
    assert 2 in engine.spec.eos_token_ids
    rendered = engine.tokenizer.render_chat((ChatMessage("user", "hi"),))
    assert text in rendered
    assert rendered.endswith("<|im_start|>assistant\n")


def test_real_text_survives_the_round_trip(engine: Engine) -> None:
    text = load_essays()[:200_000]
    ids = engine.tokenizer.encode(text)
    assert engine.tokenizer.decode(ids) == text


def test_shape_is_that_of_smollm2(engine: Engine) -> None:
    spec = engine.spec
    assert (spec.name, spec.num_layers, spec.num_q_heads, spec.num_kv_heads) == ("demo", 30, 9, 3)
    assert spec.max_model_len == 8192


def test_greedy_ids_equal_transformers_on_a_real_prompt(engine: Engine) -> None:
    prompt = essay_ids(engine, 600, start=5_000)
    expected = greedy_reference(reference_model(), prompt, 64)
    requests = [
        make_request(prompt, compression, max_new_tokens=64, ignore_eos=True)
        for compression in (FULL, CompressionConfig(max_capacity_prompt=600))
    ]
    for events in run_together(engine, requests):
        assert list(ids_of(events)) == expected


@pytest.mark.parametrize(
    ("capacity", "window_size", "kernel_size", "pooling"),
    [(128, 16, 15, "max"), (64, 32, 5, "avg"), (400, 16, 7, "max")],
)
def test_decode_after_compression_equals_the_masked_oracle(
    engine: Engine, capacity: int, window_size: int, kernel_size: int, pooling: Pooling
) -> None:
    prompt = essay_ids(engine, 700, start=30_000)
    compression = CompressionConfig(
        max_capacity_prompt=capacity,
        window_size=window_size,
        kernel_size=kernel_size,
        pooling=pooling,
    )
    answer = ask(engine, prompt, compression, explain=True, max_new_tokens=64, ignore_eos=True)
    output_ids = answer.token_ids[0]
    found = engine.score(prompt, output_ids, compression)

    decoder = MaskedDecoder(reference_model())
    oracle = decoder.run(
        prompt, output_ids, knobs=Knobs(capacity, window_size, kernel_size, pooling)
    )
    report = answer.summary.compression
    assert report is not None
    assert report.kept_counts is not None
    counts = [[sum(token in head for head in kept) for token in range(700)] for kept in oracle.kept]
    assert [list(layer) for layer in report.kept_counts.per_layer] == counts, (
        f"kept tokens differ; smallest margin between scores {oracle.smallest_margin:.2g}"
    )
    error = float((found - oracle.logits).abs().max())
    assert error < 1e-4, f"largest difference {error:.3g}"
    assert output_ids == tuple(oracle.logits.argmax(dim=-1).tolist())
    masses = torch.tensor(oracle.kept_attention_mass)
    assert report.kept_attention_mass == pytest.approx(float(masses.mean()), abs=1e-4)


def test_streamed_text_has_no_broken_characters(engine: Engine) -> None:
    prompt = "Repeat exactly: 日本語 🎉 naïve 中文 🎉🎉 日本語 🎉 naïve 中文 🎉🎉 日本語 🎉 naïve"
    engine.add_request(make_request(prompt, FULL, max_new_tokens=60, ignore_eos=True))
    events = drain(engine)
    assert all("\ufffd" not in event.text for event in events)
    whole = ask(engine, prompt, FULL, max_new_tokens=60, ignore_eos=True)
    assert text_of(events) == whole.texts[0]
    assert any(ord(char) > 0x2000 for char in whole.texts[0]), "the prompt should provoke them"
