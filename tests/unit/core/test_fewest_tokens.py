"""A text that is too long by far is refused by its length, without tokenising it."""

import random
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from snapkv_core import GenerationRequest, PromptTooLongError, SamplingParams
from snapkv_core.config import CompressionConfig
from snapkv_core.models.tokenizer import HFTokenizer
from tests.support.engines import make_engine
from tests.support.models import CONTEXT, build_model


def byte_level(normalizer: Any = None) -> HFTokenizer:
    """Build a byte-level tokenizer with a few merges; the longest token has three characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("ab", "c")]
    words = [*alphabet, "ab", "abc"]
    backend = Tokenizer(
        models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=merges)
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if normalizer is not None:
        backend.normalizer = normalizer
    return HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


def test_no_text_has_fewer_tokens() -> None:
    """Random texts of letters that merge well, and of characters of several bytes."""
    tokenizer, draw = byte_level(), random.Random(1)
    for _ in range(300):
        text = "".join(draw.choices(["ab", "abc", "x", " ", "\u00e4", "\U0001f600"], k=30))
        assert 0 < tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text))


def test_it_is_reached() -> None:
    assert byte_level().fewest_tokens("abc" * 20) == 20 == len(byte_level().encode("abc" * 20))


@pytest.mark.parametrize(
    ("normalizer", "fewest"),
    [
        (normalizers.Sequence([normalizers.Prepend("_"), normalizers.Replace(" ", "_")]), 20),
        (normalizers.Replace("abc", "x"), 0),
        (normalizers.NFKC(), 0),
        (normalizers.Sequence([normalizers.Prepend("_"), normalizers.Strip()]), 0),
    ],
)
def test_a_normalizer_that_may_shorten_leaves_it_to_counting(normalizer: Any, fewest: int) -> None:
    assert byte_level(normalizer).fewest_tokens("abc" * 20) == fewest


def test_a_prompt_too_long_by_far_is_refused_uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_level()
    engine = make_engine(build_model("llama", 2, seed=1), tokenizer)

    def refuse(*_: object, **__: object) -> list[int]:
        raise AssertionError("it was tokenised")

    monkeypatch.setattr(tokenizer, "encode", refuse)
    request = GenerationRequest(
        "long", "abc" * (CONTEXT + 1), SamplingParams(max_new_tokens=4), CompressionConfig()
    )
    with pytest.raises(PromptTooLongError, match=f"at least {CONTEXT + 1} tokens"):
        engine.prepare(request)
