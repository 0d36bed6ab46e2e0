"""Requests do not disturb each other, no prompt length is special, and the report is the truth."""

from collections.abc import Mapping
from functools import cache

import pytest

from snapkv_core import (
    CompressionConfig,
    Engine,
    FinishReason,
    InvalidParameterError,
    PromptTooLongError,
    QueueFullError,
    RequestOutput,
)
from tests.support.engines import (
    FULL,
    ask,
    drain,
    ids_of,
    make_engine,
    make_request,
    run_together,
    summary_of,
    text_of,
)
from tests.support.models import CONTEXT, EOS_ID, build_model, greedy_reference, random_prompt

_SMALL = CompressionConfig(max_capacity_prompt=24, window_size=8, kernel_size=3)
_LARGE = CompressionConfig(max_capacity_prompt=90, window_size=16, kernel_size=5, pooling="max")
_WINDOW, _CAPACITY = 8, 24


@cache
def shared_engine() -> Engine:
    """Build one engine with three query heads per KV head for the whole file."""
    return make_engine(build_model("llama", 2, seed=21), prefill_chunk_tokens=32)


def told(output: RequestOutput) -> Mapping[str, object]:
    """Everything in an answer that must repeat; times do not."""
    summary = output.summary
    return {
        "texts": output.texts,
        "token_ids": output.token_ids,
        "report": summary.compression,
        "finish_reasons": summary.finish_reasons,
        "counts": (summary.num_prompt_tokens, summary.num_output_tokens),
    }


def test_the_same_request_twice_and_around_another_gives_the_same_answer() -> None:
    engine = shared_engine()
    prompt_a, prompt_b = random_prompt(150, seed=1), random_prompt(101, seed=2)

    def ask_a() -> Mapping[str, object]:
        return told(ask(engine, prompt_a, _SMALL, explain=True, max_new_tokens=24))

    first, second = ask_a(), ask_a()
    ask(engine, prompt_b, _LARGE, max_new_tokens=7)
    third = ask_a()
    ask(engine, prompt_b, FULL, max_new_tokens=7)
    assert first == second == third == ask_a()


def test_different_budgets_at_once_equal_their_solo_runs() -> None:
    engine = shared_engine()
    cases = [
        (random_prompt(150, seed=1), _SMALL, 30),
        (random_prompt(150, seed=1), _LARGE, 30),
        (random_prompt(150, seed=1), FULL, 12),
        (random_prompt(20, seed=3), _SMALL, 40),
        (random_prompt(1, seed=4), _SMALL, 9),
        (random_prompt(97, seed=5), _LARGE, 1),
    ]
    solo = [
        ask(engine, prompt, compression, explain=True, max_new_tokens=length, ignore_eos=True)
        for prompt, compression, length in cases
    ]
    requests = [
        make_request(prompt, compression, explain=True, max_new_tokens=length, ignore_eos=True)
        for prompt, compression, length in cases
    ]
    together = run_together(engine, requests)

    for alone, events in zip(solo, together, strict=True):
        assert ids_of(events) == alone.token_ids[0]
        assert text_of(events) == alone.texts[0]
        assert summary_of(events).compression == alone.summary.compression
    assert len({output.token_ids for output in solo[:3]}) == 3, "the budgets must matter here"
    assert engine.kv_bytes == 0


def test_more_requests_than_slots_wait_their_turn_and_all_finish() -> None:
    model = build_model("mistral", 1, seed=21)
    engine = make_engine(model, max_num_seqs=2, prefill_chunk_tokens=16)
    prompts = [random_prompt(40, seed=seed) for seed in range(7)]
    requests = [
        make_request(prompt, _SMALL, max_new_tokens=40, ignore_eos=True) for prompt in prompts
    ]
    for request in requests:
        engine.add_request(request)
    assert engine.num_waiting == 7
    most = 0
    finished = []
    while engine.has_work:
        finished += [event.request_id for event in engine.step() if event.summary]
        most = max(most, engine.num_running)
    assert most == 2
    assert sorted(finished) == sorted(request.request_id for request in requests)


@pytest.mark.parametrize("num_kv_heads", [6, 2, 1])
@pytest.mark.parametrize(
    "length",
    [1, 2, _WINDOW - 1, _WINDOW, _WINDOW + 1, _CAPACITY - 1, _CAPACITY, _CAPACITY + 1],
)
def test_no_prompt_length_is_special(length: int, num_kv_heads: int) -> None:
    model = build_model("qwen2", num_kv_heads, seed=21)
    engine = make_engine(model, prefill_chunk_tokens=16)
    prompt = random_prompt(length, seed=length)
    uncompressed = ask(engine, prompt, FULL, max_new_tokens=16, ignore_eos=True)
    found = ask(engine, prompt, _SMALL, max_new_tokens=16, ignore_eos=True)

    report = found.summary.compression
    assert report is not None
    assert report.method == "snapkv"
    assert report.original_entries == length
    assert report.compressed_entries == min(length, _CAPACITY)
    if length <= _CAPACITY:
        expected = greedy_reference(build_model("qwen2", num_kv_heads, seed=21), prompt, 16)
        assert list(found.token_ids[0]) == expected
        assert found.texts == uncompressed.texts
        assert report.skipped == "prompt_fits_capacity"
        assert report.kept_attention_mass == 1.0
        assert report.compression_ratio == 1.0
    else:
        assert report.skipped is None
        assert 0.0 < report.kept_attention_mass < 1.0


@pytest.mark.parametrize("num_kv_heads", [6, 2, 1])
def test_the_report_counts_kv_heads_and_the_memory_is_really_that_small(num_kv_heads: int) -> None:
    model = build_model("llama", num_kv_heads, seed=21)
    engine = make_engine(model, prefill_chunk_tokens=32, page_size=8)
    prompt = random_prompt(120, seed=6)
    # Layers times KV heads times head size times K and V times the bytes of a float32.
    token_bytes = 4 * num_kv_heads * 16 * 2 * 4

    engine.add_request(make_request(prompt, _SMALL, max_new_tokens=10, ignore_eos=True))
    events = engine.step()
    while not events:
        events = engine.step()
    # The kept prompt fills three pages of eight in each layer and head; no more is held for it.
    assert engine.kv_bytes == 24 * token_bytes
    engine.step()
    assert engine.kv_bytes == (24 + 8) * token_bytes, "the second token took a page of its own"
    report = summary_of(events + drain(engine)).compression

    assert report is not None
    assert report.original_bytes == 120 * token_bytes
    assert report.compressed_bytes == 24 * token_bytes
    assert report.compression_ratio == 5.0


def test_a_prompt_read_in_full_reports_why_nothing_was_dropped() -> None:
    report = ask(shared_engine(), random_prompt(100), FULL, max_new_tokens=1).summary.compression
    assert report is not None
    assert report.skipped == "method_full"
    assert report.kept_attention_mass == 1.0
    assert report.compressed_entries == report.original_entries == 100
    assert report.compressed_bytes == report.original_bytes


def test_explain_counts_every_kept_entry_once() -> None:
    prompt = random_prompt(100, seed=8)
    output = ask(shared_engine(), prompt, _SMALL, explain=True, max_new_tokens=1)
    report = output.summary.compression
    assert report is not None
    counts = report.kept_counts
    assert counts is not None
    assert [sum(layer) for layer in counts.per_layer] == [24 * 2] * 4
    assert counts.total == tuple(sum(layer[i] for layer in counts.per_layer) for i in range(100))
    assert counts.total[-8:] == (4 * 2,) * 8, "the window is kept whole, by index"
    without = ask(shared_engine(), prompt, _SMALL, max_new_tokens=1).summary.compression
    assert without is not None
    assert without.kept_counts is None


def test_an_answer_ends_at_its_length_or_at_the_end_token() -> None:
    prompt = random_prompt(60, seed=9)
    model = build_model("mistral", 2, seed=22)
    by_length = ask(make_engine(model), prompt, max_new_tokens=20, ignore_eos=True)
    assert by_length.summary.finish_reasons == (FinishReason.LENGTH,)
    assert by_length.summary.num_output_tokens == len(by_length.token_ids[0]) == 20

    # The sixth token becomes the end token: same model, rows of the head swapped.
    sixth = by_length.token_ids[0][5]
    assert sixth not in by_length.token_ids[0][:5], "choose another seed"
    swapped = build_model("mistral", 2, seed=22)
    rows = swapped.lm_head.weight.data
    rows[[sixth, EOS_ID]] = rows[[EOS_ID, sixth]].clone()
    ended = ask(make_engine(swapped), prompt, max_new_tokens=20)
    assert ended.token_ids[0] == (*by_length.token_ids[0][:5], EOS_ID)
    assert ended.summary.finish_reasons == (FinishReason.STOP,)
    assert ended.summary.num_output_tokens == 6


def test_a_prompt_beyond_the_context_is_refused_with_both_numbers_and_the_next_one_works() -> None:
    engine = shared_engine()
    with pytest.raises(PromptTooLongError) as refused:
        ask(engine, [1] * (CONTEXT + 5), _SMALL, max_new_tokens=4)
    assert str(CONTEXT + 5) in str(refused.value)
    assert str(CONTEXT) in str(refused.value)
    with pytest.raises(PromptTooLongError):
        ask(engine, [1] * (CONTEXT - 3), _SMALL, max_new_tokens=4)
    fits = ask(engine, [1] * (CONTEXT - 4), _SMALL, max_new_tokens=4, ignore_eos=True)
    assert fits.summary.num_output_tokens == 4
    shrunk = ask(engine, [1] * (CONTEXT - 4), _SMALL, ignore_eos=True)
    assert shrunk.summary.num_output_tokens == 4


@pytest.mark.parametrize("prompt", ["", (), [-1], [260], [5, 10**20]])
def test_an_empty_prompt_or_an_unknown_token_is_refused(prompt: object) -> None:
    with pytest.raises(InvalidParameterError, match="prompt"):
        ask(shared_engine(), prompt, _SMALL, max_new_tokens=4)
    assert ask(shared_engine(), "hello", _SMALL, max_new_tokens=4).texts


def test_a_full_queue_refuses_and_recovers() -> None:
    model = build_model("mistral", 1, seed=21)
    engine = make_engine(model, max_num_seqs=1, max_num_waiting=2)
    for _ in range(3):  # one that there is room for, and two that may wait beyond it
        engine.add_request(make_request("hi", max_new_tokens=2))
    with pytest.raises(QueueFullError):
        engine.add_request(make_request("hi", max_new_tokens=2))
    drain(engine)
    assert ask(engine, "hi", max_new_tokens=2).texts
