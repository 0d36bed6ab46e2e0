"""A seed fixes an answer, whatever else runs, and each of `n` choices is one of its own."""

from functools import cache
from typing import Any

from snapkv_core import CompressionConfig, Engine
from tests.support.engines import ask, ids_of, make_engine, make_request, run_together, summary_of
from tests.support.models import build_model, random_prompt

_COMPRESSION = CompressionConfig(max_capacity_prompt=30, window_size=8, kernel_size=3)
_PROMPT = random_prompt(80, seed=1)
_WARM: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 16, "ignore_eos": True}


@cache
def shared_engine() -> Engine:
    """Build one engine for the whole file."""
    return make_engine(build_model("llama", 2, seed=31), max_num_seqs=16)


def test_the_same_seed_gives_the_same_answer_and_another_seed_another() -> None:
    engine = shared_engine()
    first = ask(engine, _PROMPT, _COMPRESSION, seed=5, **_WARM)
    ask(engine, random_prompt(33), _COMPRESSION, seed=5, **_WARM)
    again = ask(engine, _PROMPT, _COMPRESSION, seed=5, **_WARM)
    other = ask(engine, _PROMPT, _COMPRESSION, seed=6, **_WARM)
    assert first.token_ids == again.token_ids
    assert first.texts == again.texts
    assert first.token_ids != other.token_ids


def test_without_a_seed_answers_differ() -> None:
    engine = shared_engine()
    answers = {ask(engine, _PROMPT, _COMPRESSION, **_WARM).token_ids for _ in range(3)}
    assert len(answers) == 3


def test_a_choice_does_not_depend_on_how_many_there_are() -> None:
    engine = shared_engine()
    five = ask(engine, _PROMPT, _COMPRESSION, seed=5, n=5, **_WARM)
    assert len(five.texts) == len(five.token_ids) == 5
    assert len(set(five.token_ids)) == 5
    for n in (1, 2, 3):
        fewer = ask(engine, _PROMPT, _COMPRESSION, seed=5, n=n, **_WARM)
        assert fewer.token_ids == five.token_ids[:n]
        assert fewer.summary.compression == five.summary.compression
    assert five.summary.num_output_tokens == 5 * 16
    assert five.summary.num_prompt_tokens == 80


def test_an_answer_does_not_depend_on_its_neighbours() -> None:
    engine = shared_engine()
    alone = ask(engine, _PROMPT, _COMPRESSION, seed=5, n=3, **_WARM)
    requests = [
        make_request(random_prompt(50, seed=9), _COMPRESSION, seed=1, n=4, **_WARM),
        make_request(_PROMPT, _COMPRESSION, seed=5, n=3, **_WARM),
        make_request(random_prompt(20, seed=8), _COMPRESSION, seed=2, n=2, **_WARM),
    ]
    events = run_together(engine, requests)[1]
    assert tuple(ids_of(events, choice) for choice in range(3)) == alone.token_ids
    assert len(summary_of(events).finish_reasons) == 3
    assert engine.kv_bytes == 0


def test_greedy_choices_are_all_the_same() -> None:
    output = ask(shared_engine(), _PROMPT, _COMPRESSION, n=3, max_new_tokens=12)
    single = ask(shared_engine(), _PROMPT, _COMPRESSION, max_new_tokens=12)
    assert output.token_ids == single.token_ids * 3


def test_top_k_of_one_is_greedy() -> None:
    greedy = ask(shared_engine(), _PROMPT, _COMPRESSION, max_new_tokens=12, ignore_eos=True)
    narrow = ask(
        shared_engine(),
        _PROMPT,
        _COMPRESSION,
        max_new_tokens=12,
        ignore_eos=True,
        temperature=1.5,
        top_k=1,
        seed=3,
    )
    assert narrow.token_ids == greedy.token_ids
