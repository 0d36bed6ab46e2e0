"""The engine's numbers are those of transformers without compression, of the masked oracle with."""

from functools import cache

import pytest
import torch

from snapkv_core import CompressionConfig, Engine
from snapkv_core.config import Pooling
from tests.oracles.masked_decode import Knobs, MaskedDecoder
from tests.support.engines import FULL, ask, make_engine
from tests.support.models import (
    FAMILIES,
    NUM_KV_HEADS,
    build_model,
    greedy_reference,
    random_prompt,
)

_SEED = 7
_PROMPT = random_prompt(200, seed=_SEED)
#: The engine computes in float32, so a choice between scores closer than this is not testable.
_MIN_MARGIN = 1e-5

every_model = [
    pytest.param(family, num_kv_heads, id=f"{family}-{num_kv_heads}kv")
    for family in FAMILIES
    for num_kv_heads in NUM_KV_HEADS
]


@cache
def engine_for(family: str, num_kv_heads: int, prefill_chunk_tokens: int = 64) -> Engine:
    """Build each engine once; requests leave nothing behind, other tests prove it."""
    model = build_model(family, num_kv_heads, seed=_SEED)
    return make_engine(model, prefill_chunk_tokens=prefill_chunk_tokens)


@pytest.mark.parametrize("compression", [FULL, CompressionConfig(max_capacity_prompt=200)])
@pytest.mark.parametrize(("family", "num_kv_heads"), every_model)
def test_greedy_ids_equal_transformers_when_the_prompt_fits(
    family: str, num_kv_heads: int, compression: CompressionConfig
) -> None:
    engine = engine_for(family, num_kv_heads)
    expected = greedy_reference(build_model(family, num_kv_heads, seed=_SEED), _PROMPT, 48)
    found = ask(engine, _PROMPT, compression, max_new_tokens=48, ignore_eos=True)
    assert list(found.token_ids[0]) == expected
    assert len(set(expected)) > 4, "a model that repeats itself proves little"


@pytest.mark.parametrize(
    ("capacity", "window_size", "kernel_size", "pooling"),
    [(24, 8, 5, "max"), (60, 5, 1, "avg"), (151, 32, 7, "max"), (100, 16, 3, "avg")],
)
@pytest.mark.parametrize(("family", "num_kv_heads"), every_model)
def test_decode_after_compression_equals_the_masked_oracle(
    family: str,
    num_kv_heads: int,
    capacity: int,
    window_size: int,
    kernel_size: int,
    pooling: Pooling,
) -> None:
    engine = engine_for(family, num_kv_heads)
    decoder = MaskedDecoder(build_model(family, num_kv_heads, seed=_SEED))
    compression = CompressionConfig(
        max_capacity_prompt=capacity,
        window_size=window_size,
        kernel_size=kernel_size,
        pooling=pooling,
    )
    answer = ask(engine, _PROMPT, compression, explain=True, max_new_tokens=64, ignore_eos=True)
    output_ids = answer.token_ids[0]

    oracle = decoder.run(
        _PROMPT, output_ids, knobs=Knobs(capacity, window_size, kernel_size, pooling)
    )
    found = engine.score(_PROMPT, output_ids, compression)
    uncompressed = decoder.run(_PROMPT, output_ids).logits

    assert oracle.smallest_margin > _MIN_MARGIN, "choose another seed"
    assert found.shape == (64, 260)
    assert found.dtype == torch.float32
    assert (found - oracle.logits).abs().max() < 1e-4
    assert output_ids == tuple(oracle.logits.argmax(dim=-1).tolist())
    # Without this the test would pass for an engine that drops nothing.
    assert (oracle.logits - uncompressed).abs().max() > 0.1

    report = answer.summary.compression
    assert report is not None
    assert report.kept_counts is not None
    assert report.kept_counts.num_kv_heads == num_kv_heads
    for counts, kept in zip(report.kept_counts.per_layer, oracle.kept, strict=True):
        expected = [sum(token in head for head in kept) for token in range(len(_PROMPT))]
        assert list(counts) == expected
    masses = torch.tensor(oracle.kept_attention_mass)
    assert report.kept_attention_mass == pytest.approx(float(masses.mean()), abs=1e-5)


@pytest.mark.parametrize(("family", "num_kv_heads"), every_model)
def test_score_without_compression_equals_the_models_own_forward(
    family: str, num_kv_heads: int
) -> None:
    output_ids = random_prompt(40, seed=99)
    model = build_model(family, num_kv_heads, seed=_SEED)
    with torch.no_grad():
        own = model(torch.tensor([[*_PROMPT, *output_ids[:-1]]])).logits[0, len(_PROMPT) - 1 :]
    found = engine_for(family, num_kv_heads).score(_PROMPT, output_ids, FULL)
    assert (found - own).abs().max() < 1e-4


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize(("family", "num_kv_heads"), every_model)
def test_where_a_prompt_is_cut_into_chunks_changes_nothing(
    family: str, num_kv_heads: int, compressed: bool
) -> None:
    # The window of 40 tokens spans several chunks of 16, and 200 is no multiple of 16 or 33.
    compression = CompressionConfig(
        max_capacity_prompt=80 if compressed else 200, window_size=40, kernel_size=5, pooling="max"
    )
    engines = [engine_for(family, num_kv_heads, chunk) for chunk in (4096, 16, 33)]
    answers = [
        ask(engine, _PROMPT, compression, explain=True, max_new_tokens=24, ignore_eos=True)
        for engine in engines
    ]
    whole = answers[0]
    for other in answers[1:]:
        assert other.token_ids == whole.token_ids
        assert other.texts == whole.texts
        assert other.summary.compression is not None
        assert whole.summary.compression is not None
        assert other.summary.compression.kept_counts == whole.summary.compression.kept_counts
    scores = [engine.score(_PROMPT, whole.token_ids[0], compression) for engine in engines]
    for score in scores[1:]:
        torch.testing.assert_close(score, scores[0], atol=1e-5, rtol=1e-5)
