"""The log-probabilities of a prompt's own tokens are those of the model in transformers."""

from functools import cache

import pytest
import torch

from snapkv_core import Engine, InvalidParameterError
from tests.support.engines import ask, make_engine
from tests.support.models import FAMILIES, build_model, random_prompt


@cache
def engine_for(family: str) -> Engine:
    """Build each engine once."""
    return make_engine(build_model(family, 2, seed=81), prefill_chunk_tokens=256)


@torch.no_grad()
def own_logprobs(family: str, prompt: tuple[int, ...]) -> torch.Tensor:
    """Score every token but the first in one forward of the whole model, in float64."""
    ids = torch.tensor([prompt])
    logits = build_model(family, 2, seed=81).double()(ids).logits[0, :-1]
    logprobs: torch.Tensor = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return logprobs


@pytest.mark.parametrize("length", [2, 128, 129, 130, 600])
@pytest.mark.parametrize("family", FAMILIES)
def test_all_tokens_but_the_first_are_scored(family: str, length: int) -> None:
    prompt = random_prompt(length, seed=length)
    engine = engine_for(family)
    found = engine.prompt_logprobs(prompt)
    assert found.shape == (length - 1,)
    assert found.dtype is torch.float32
    assert (found - own_logprobs(family, prompt)).abs().max() < 1e-4
    assert engine.kv_bytes == 0
    assert engine.parts.ledger.num_pages_reserved == 0


@pytest.mark.parametrize(
    ("start", "end"), [(1, 2), (1, 128), (128, 129), (127, 258), (40, 300), (299, None), (200, 300)]
)
def test_a_range_is_that_part_of_the_whole(start: int, end: int | None) -> None:
    prompt = random_prompt(300, seed=5)
    found = engine_for("llama").prompt_logprobs(prompt, start, end)
    expected = own_logprobs("llama", prompt)[start - 1 : 299 if end is None else end - 1]
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("start", "end"), [(0, 5), (5, 5), (6, 5), (1, 31), (-3, None), (31, None)]
)
def test_a_range_outside_the_prompt_is_refused(start: int, end: int | None) -> None:
    engine = engine_for("llama")
    with pytest.raises(InvalidParameterError, match="start"):
        engine.prompt_logprobs(random_prompt(30), start, end)
    assert engine.kv_bytes == 0
    assert engine.parts.ledger.num_pages_reserved == 0


def test_scoring_leaves_the_engine_as_it_was() -> None:
    engine = engine_for("qwen2")
    prompt = random_prompt(90, seed=2)
    before = ask(engine, prompt, max_new_tokens=12, ignore_eos=True).token_ids
    engine.prompt_logprobs(prompt)
    engine.check_integrity()
    assert ask(engine, prompt, max_new_tokens=12, ignore_eos=True).token_ids == before
