"""A request whose time is up ends where it is, says so, and gives back what it held."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from snapkv_core import CompressionConfig, Engine, FinishReason, GenerationRequest, TokenEvent
from snapkv_core.engine import admission, engine, request_state
from tests.support.engines import ask, drain, ids_of, make_engine, make_request, summary_of
from tests.support.models import build_model, random_prompt

_SMALL = CompressionConfig(max_capacity_prompt=24, window_size=8, kernel_size=3)
_PROMPT = random_prompt(60, seed=1)
_LONG_PROMPT = random_prompt(1_500, seed=2)


class Clock:
    """The time as engine and requests see it."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def monotonic(self) -> float:
        """Return it."""
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Take the clock out of the engine's hands."""
    clock = Clock()
    fake = SimpleNamespace(monotonic=clock.monotonic)
    for module in (admission, engine, request_state):
        monkeypatch.setattr(module, "time", fake)
    return clock


def new_engine(**settings: Any) -> Engine:
    """Build an engine that takes several steps for a long prompt."""
    model = build_model("llama", 2, seed=31)
    return make_engine(model, decode_gap_target_ms=1, prefill_chunk_tokens=256, **settings)


def timed(request: GenerationRequest, timeout_s: float | None) -> GenerationRequest:
    """Give a request a time of its own."""
    return replace(request, timeout_s=timeout_s)


def require_empty(engine: Engine) -> None:
    """Check that an idle engine holds and promises nothing."""
    engine.check_integrity()
    assert not engine.has_work
    assert engine.parts.manager.num_pages_used == 0
    assert engine.parts.ledger.num_pages_reserved == 0
    assert engine.parts.ledger.workspace_bytes_reserved == 0


def require_overdue(events: list[TokenEvent], num_choices: int) -> None:
    """Check the events with which a request ends that is late."""
    assert [event.choice_index for event in events] == list(range(num_choices))
    assert {event.finish_reason for event in events} == {FinishReason.DEADLINE}
    assert all(event.error and "time was up" in event.error for event in events)
    assert summary_of(events).finish_reasons == (FinishReason.DEADLINE,) * num_choices


def test_a_request_that_waits_ends_without_having_been_read(clock: Clock) -> None:
    running = make_request(_PROMPT, _SMALL, max_new_tokens=12, ignore_eos=True)
    waiting = timed(make_request(_PROMPT, _SMALL, max_new_tokens=12), 5.0)
    inner = new_engine(max_num_seqs=1)
    alone = ask(inner, _PROMPT, _SMALL, max_new_tokens=12, ignore_eos=True).token_ids[0]
    for request in (running, waiting):
        inner.add_request(request)
    events = inner.step()
    clock.now_s += 4.9
    events += inner.step()
    assert inner.num_waiting == 1
    clock.now_s += 0.1
    found = [event for event in inner.step() if event.request_id == waiting.request_id]
    require_overdue(found, 1)
    summary = summary_of(found)
    assert (summary.num_prompt_tokens, summary.num_output_tokens) == (60, 0)
    assert summary.compression is None
    assert summary.timings.queue_ms == summary.timings.total_ms == pytest.approx(5_000)
    assert inner.num_waiting == 0
    assert inner.num_running == 1
    rest = [event for event in drain(inner) if event.request_id == running.request_id]
    assert ids_of(rest) == alone[-len(ids_of(rest)) :]
    require_empty(inner)


@pytest.mark.parametrize("n", [1, 3])
def test_a_request_that_is_being_read_gives_back_its_workspace(clock: Clock, n: int) -> None:
    inner = new_engine()
    inner.add_request(timed(make_request(_LONG_PROMPT, _SMALL, max_new_tokens=5, n=n), 5.0))
    # Until some layers are stored and some are not.
    while not inner.parts.manager.num_pages_used:
        assert inner.step() == []
    assert inner.num_running == n
    assert inner.parts.ledger.workspace_bytes_reserved > 0
    clock.now_s += 5.0
    events = inner.step()
    require_overdue(events, n)
    assert summary_of(events).compression is None
    require_empty(inner)


def test_a_request_that_generates_keeps_what_it_has_said(clock: Clock) -> None:
    inner = new_engine()
    sampling: dict[str, Any] = {"temperature": 1.0, "seed": 3, "n": 3, "ignore_eos": True}
    expected = ask(inner, _PROMPT, _SMALL, max_new_tokens=8, **sampling).token_ids
    inner.add_request(timed(make_request(_PROMPT, _SMALL, max_new_tokens=8, **sampling), 5.0))
    events: list[TokenEvent] = []
    while len(events) < 3 * 4:
        events += inner.step()
    clock.now_s += 5.0
    last = inner.step()
    require_overdue(last, 3)
    assert [ids_of(events + last, choice) for choice in range(3)] == [ids[:4] for ids in expected]
    summary = summary_of(events + last)
    assert summary.num_output_tokens == 12
    assert summary.compression is not None
    require_empty(inner)


def test_choices_that_have_ended_stay_as_they_are(clock: Clock) -> None:
    inner = new_engine()
    sampling: dict[str, Any] = {"temperature": 1.0, "seed": 3, "n": 2, "ignore_eos": True}
    whole = ask(inner, _PROMPT, _SMALL, max_new_tokens=30, **sampling).token_ids
    only_first = next(chr(i) for i in whole[0][:10] if i not in whole[1] and 32 < i < 127)
    inner.add_request(
        timed(make_request(_PROMPT, _SMALL, max_new_tokens=30, stop=(only_first,), **sampling), 5.0)
    )
    events: list[TokenEvent] = []
    while not any(event.finish_reason for event in events):
        events += inner.step()
    clock.now_s += 5.0
    (late,) = inner.step()
    assert late.choice_index == 1
    assert late.summary is not None
    assert late.summary.finish_reasons == (FinishReason.STOP, FinishReason.DEADLINE)
    require_empty(inner)


@pytest.mark.parametrize(
    ("timeout_s", "ends_after_s"), [(None, 20.0), (500.0, 20.0), (7.0, 7.0), (0.001, 0.001)]
)
def test_the_engines_own_limit_is_the_longest_time(
    clock: Clock, timeout_s: float | None, ends_after_s: float
) -> None:
    inner = new_engine(request_timeout_s=20.0)
    request = make_request(_PROMPT, _SMALL, max_new_tokens=1_000, ignore_eos=True)
    inner.add_request(timed(request, timeout_s))
    clock.now_s += ends_after_s * 0.999
    assert not any(event.finish_reason for event in inner.step())
    clock.now_s += ends_after_s * 0.002
    require_overdue(inner.step(), 1)
    require_empty(inner)


def test_an_answer_that_is_in_time_is_not_touched(clock: Clock) -> None:
    inner = new_engine()
    request = timed(make_request(_PROMPT, _SMALL, max_new_tokens=3, ignore_eos=True), 5.0)
    inner.add_request(request)
    events = drain(inner)
    clock.now_s += 10.0
    assert summary_of(events).finish_reasons == (FinishReason.LENGTH,)
    assert ask(inner, _PROMPT, _SMALL, max_new_tokens=3).texts


def test_many_late_requests_end_in_one_step(clock: Clock) -> None:
    inner = new_engine(max_num_seqs=3)
    requests = [
        timed(make_request(_PROMPT, _SMALL, max_new_tokens=50, ignore_eos=True, n=n), 5.0)
        for n in (2, 1, 3, 1)
    ]
    for request in requests:
        inner.add_request(request)
    for _ in range(4):
        inner.step()
    clock.now_s += 5.0
    events = inner.step()
    for request in requests:
        own = [event for event in events if event.request_id == request.request_id]
        require_overdue(own, request.sampling.n)
    require_empty(inner)
