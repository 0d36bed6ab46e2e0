"""Prompts are the same in every run, of the size asked for, and different from each other."""

import pytest

from benchmarks.workload import text_of, token_ids, words


def test_prompts_are_the_same_in_every_run() -> None:
    """A figure of today is one of the same text as yesterday's."""
    assert words(6, 1) == words(6, 1)
    assert token_ids(5, 2, 49_152) == token_ids(5, 2, 49_152)


def test_variants_share_no_beginning() -> None:
    """No cache of prefixes can answer for another prompt."""
    assert len({words(4, variant) for variant in range(50)}) == 50
    assert len({token_ids(3, variant, 49_152)[0] for variant in range(50)}) == 50


def test_token_ids_fit_the_vocabulary() -> None:
    """A tiny model's as well."""
    ids = token_ids(500, 3, 97)
    assert len(ids) == 500
    assert 0 <= min(ids) <= max(ids) < 97


@pytest.mark.parametrize(("tokens_per_word", "expected"), [(1, 101), (2, 50), (3, 33)])
def test_text_is_cut_to_the_tokens_asked_for(tokens_per_word: int, expected: int) -> None:
    """As near below as whole words allow."""
    text = text_of(101, 7, lambda text: tokens_per_word * len(text.split()))
    assert len(text.split()) == expected


def test_without_a_tokenizer_a_word_is_a_token() -> None:
    """Two servers with tokenizers of their own get the same text."""
    assert len(text_of(64, 7, None).split()) == 64
