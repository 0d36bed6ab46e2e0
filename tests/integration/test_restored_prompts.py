"""A prompt whose KV comes out of a snapshot is answered as if it had been read."""

import random
from functools import cache
from typing import Any, cast

import pytest
import torch

from snapkv_core import CompressionConfig, Engine, FinishReason, GenerationRequest, TokenEvent
from snapkv_core.config import COMPRESSION_METHODS
from snapkv_core.engine.finding import NOT_LOOKED_UP, Finding
from snapkv_core.kv_cache.snapshot import PromptSnapshot
from tests.support.engines import (
    FULL,
    drain,
    ids_of,
    make_engine,
    make_request,
    run_together,
    summary_of,
    text_of,
)
from tests.support.models import build_model, random_prompt

PROMPT = random_prompt(150, seed=1)
BUDGETS = {
    method: CompressionConfig(
        method=cast(Any, method), max_capacity_prompt=24, window_size=8, kernel_size=3
    )
    for method in COMPRESSION_METHODS
}


@cache
def shared_engine() -> Engine:
    """Build one engine for the whole file."""
    return make_engine(build_model("llama", 2, seed=21), prefill_chunk_tokens=32)


def slow_reader() -> Engine:
    """Build an engine that reads a long prompt in many steps."""
    model = build_model("llama", 2, seed=21)
    return make_engine(model, decode_gap_target_ms=1, overtake_max_tokens=10)


def answer(
    engine: Engine, request: GenerationRequest, snapshot: PromptSnapshot | None = None
) -> tuple[list[TokenEvent], list[PromptSnapshot | None]]:
    """Run one request alone; returns its events and the snapshots that were given."""
    given: list[PromptSnapshot | None] = []
    engine.add(request, engine.prepare(request), Finding("hit", snapshot, given.append))
    events = drain(engine)
    assert engine.kv_bytes == 0
    return events, given


def told(events: list[TokenEvent], num_choices: int = 1) -> object:
    """Everything in an answer that must repeat; times do not."""
    summary = summary_of(events)
    return (
        [ids_of(events, index) for index in range(num_choices)],
        [text_of(events, index) for index in range(num_choices)],
        summary.compression,
        summary.finish_reasons,
        (summary.num_prompt_tokens, summary.num_output_tokens),
    )


def read_once(compression: CompressionConfig = BUDGETS["snapkv"]) -> PromptSnapshot:
    """Read the prompt and return what that gave."""
    _, (snapshot,) = answer(shared_engine(), make_request(PROMPT, compression, max_new_tokens=1))
    assert snapshot is not None
    return snapshot


@pytest.mark.parametrize("method", COMPRESSION_METHODS)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 7}], ids=["greedy", "seed"])
def test_answer_and_report_equal_those_of_reading(method: str, sampling: dict[str, Any]) -> None:
    """Token for token, and which prompt tokens were kept."""
    engine = shared_engine()

    def request() -> GenerationRequest:
        return make_request(PROMPT, BUDGETS[method], explain=True, max_new_tokens=24, **sampling)

    read, (snapshot,) = answer(engine, request())
    assert snapshot is not None
    restored, _ = answer(engine, request(), snapshot)
    assert told(restored) == told(read)


def test_what_was_kept_is_explained_of_a_prompt_that_was_read_without() -> None:
    """The snapshot does not depend on who asked first."""
    engine = shared_engine()
    request = make_request(PROMPT, BUDGETS["snapkv"], explain=True, max_new_tokens=3)
    read, _ = answer(engine, request)
    request = make_request(PROMPT, BUDGETS["snapkv"], explain=True, max_new_tokens=3)
    restored, _ = answer(engine, request, read_once())
    assert told(restored) == told(read)


def test_prompt_that_fits_and_bfloat16() -> None:
    """Nothing was dropped, and the numbers are stored as they are in the pool."""
    model: Any = build_model("llama", 2, seed=3)
    engine = make_engine(model.to(torch.bfloat16))
    engine_says = []
    snapshot = None
    for _ in range(2):
        request = make_request(PROMPT, FULL, explain=True, max_new_tokens=12)
        events, given = answer(engine, request, snapshot)
        snapshot = snapshot or given[0]
        engine_says.append(told(events))
    assert engine_says[0] == engine_says[1]


def test_choices_share_the_restored_prompt() -> None:
    engine = shared_engine()
    sampling: dict[str, Any] = {"n": 3, "temperature": 1.0, "seed": 11, "max_new_tokens": 9}
    read, _ = answer(engine, make_request(PROMPT, BUDGETS["snapkv"], **sampling))
    restored, _ = answer(engine, make_request(PROMPT, BUDGETS["snapkv"], **sampling), read_once())
    assert told(restored, 3) == told(read, 3)


def test_no_layer_runs_for_a_restored_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """One slice, one token, no decode step: the model is not called."""
    engine, snapshot = shared_engine(), read_once()
    decoder = engine.parts.runner._decoder

    def refuse(*_: object) -> None:
        raise AssertionError("a layer ran")

    monkeypatch.setattr(decoder, "run_layer", refuse)
    request = make_request(PROMPT, BUDGETS["snapkv"], max_new_tokens=1)
    events, _ = answer(engine, request, snapshot)
    assert summary_of(events).finish_reasons == (FinishReason.LENGTH,)


def test_it_needs_no_workspace_and_overtakes_a_prompt_being_read() -> None:
    snapshot = read_once()
    engine = slow_reader()
    long = make_request(random_prompt(1_700, seed=5), FULL, max_new_tokens=2)
    engine.add_request(long)
    for _ in range(3):
        assert engine.step() == [], "the long prompt must still be read"
    held_bytes = engine.parts.ledger.workspace_bytes_reserved
    assert held_bytes > 0
    request = make_request(PROMPT, BUDGETS["snapkv"], max_new_tokens=2)
    engine.add(request, engine.prepare(request), Finding("hit", snapshot))
    (event,) = [event for event in engine.step() if event.request_id == request.request_id]
    assert event.token_ids
    assert engine.parts.ledger.workspace_bytes_reserved == held_bytes
    assert {event.request_id for event in drain(engine)} == {long.request_id, request.request_id}


def test_restored_and_read_at_once_equal_their_solo_runs() -> None:
    """Mixed at random with aborts: each answer is its own, and nothing is left behind."""
    engine, snapshot = shared_engine(), read_once()
    expected, _ = answer(engine, make_request(PROMPT, BUDGETS["snapkv"], max_new_tokens=10))
    other = random_prompt(90, seed=8)
    (expected_other,) = run_together(engine, [make_request(other, FULL, max_new_tokens=10)])
    draw = random.Random(3)
    requests = []
    for _ in range(30):
        is_restored = draw.random() < 0.5
        request = make_request(
            PROMPT if is_restored else other,
            BUDGETS["snapkv"] if is_restored else FULL,
            max_new_tokens=10,
        )
        finding = Finding("hit", snapshot) if is_restored else NOT_LOOKED_UP
        engine.add(request, engine.prepare(request), finding)
        requests.append((request.request_id, is_restored, draw.random() < 0.2))
    events: list[TokenEvent] = []
    while engine.has_work:
        events += engine.step()
        engine.check_integrity()
        for request_id, _, is_aborted in requests:
            if is_aborted and draw.random() < 0.1:
                engine.abort(request_id)
    for request_id, is_restored, is_aborted in requests:
        if not is_aborted:
            own = [event for event in events if event.request_id == request_id]
            assert told(own) == told(expected if is_restored else expected_other)
    assert engine.kv_bytes == 0
    assert engine.parts.ledger.num_pages_reserved == 0


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_whoever_waits_for_a_snapshot_is_told_that_there_is_none(num_steps: int) -> None:
    """The request was aborted while it waited or was read."""
    engine = slow_reader()
    given: list[PromptSnapshot | None] = []
    request = make_request(random_prompt(1_700, seed=5), FULL, max_new_tokens=4)
    engine.add(request, engine.prepare(request), Finding("stored", None, given.append))
    for _ in range(num_steps):
        engine.step()
    engine.abort(request.request_id)
    assert given == [None]
    assert not engine.has_work


def test_snapshot_that_cannot_be_taken_costs_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = shared_engine()
    expected, _ = answer(engine, make_request(PROMPT, FULL, max_new_tokens=4))

    def fail(_: int) -> PromptSnapshot:
        raise RuntimeError("no memory")

    monkeypatch.setattr(engine.parts.runner, "snapshot", fail)
    events, given = answer(engine, make_request(PROMPT, FULL, max_new_tokens=4))
    assert told(events) == told(expected)
    assert given == [None]
