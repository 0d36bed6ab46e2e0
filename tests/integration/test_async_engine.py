"""Streams of the asyncio front: all events in order, an abort when a reader leaves, a clean end."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import cache

import pytest

from snapkv_core import (
    AsyncEngine,
    CompressionConfig,
    CompressionReport,
    DeadlineExceededError,
    EngineStoppedError,
    FinishReason,
    GenerationRequest,
    InvalidParameterError,
    QueueFullError,
    RequestSummary,
    StepStats,
    TokenEvent,
)
from snapkv_core.sequence import Sequence
from tests.support.engines import ask, ids_of, make_engine, make_request, summary_of, text_of
from tests.support.models import build_model, random_prompt

_COMPRESSION = CompressionConfig(max_capacity_prompt=24, window_size=8, kernel_size=3)
_PROMPT = random_prompt(100, seed=1)


@cache
def solo_ids(seed: int, length: int) -> tuple[int, ...]:
    """Return what an engine without threads answers."""
    engine = make_engine(build_model("llama", 2, seed=51))
    prompt = random_prompt(100, seed=seed)
    return ask(engine, prompt, _COMPRESSION, max_new_tokens=length, ignore_eos=True).token_ids[0]


class Recorder:
    """An observer that keeps the summary of every request that ended."""

    def __init__(self) -> None:
        self.summaries: list[RequestSummary] = []

    def on_prompt_compressed(self, request_id: str, report: CompressionReport) -> None:
        """Ignore it."""

    def on_request_finished(self, summary: RequestSummary) -> None:
        """Keep it."""
        self.summaries.append(summary)

    def on_step(self, step: StepStats) -> None:
        """Ignore it."""

    def reasons(self) -> list[FinishReason]:
        """Name why the choices of all requests ended, in order."""
        return [reason for summary in self.summaries for reason in summary.finish_reasons]


@pytest.fixture
def recorder() -> Recorder:
    """Give the engine's observer."""
    return Recorder()


@pytest.fixture
async def engine(recorder: Recorder) -> AsyncIterator[AsyncEngine]:
    """Start an engine with four slots and stop it afterwards."""
    inner = make_engine(build_model("llama", 2, seed=51), max_num_seqs=4, max_num_waiting=3)
    inner.observer = recorder
    running = AsyncEngine(inner)
    running.start()
    yield running
    await asyncio.to_thread(running.stop)


async def idle(engine: AsyncEngine) -> None:
    """Wait until the engine holds nothing."""
    for _ in range(2_000):
        stats = engine.stats()
        if not (stats.num_running or stats.num_waiting or stats.kv_bytes):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"the engine did not come to rest: {engine.stats()}")


async def read(engine: AsyncEngine, seed: int, length: int) -> list[TokenEvent]:
    """Submit a request and read it to its end."""
    request = make_request(
        random_prompt(100, seed=seed), _COMPRESSION, max_new_tokens=length, ignore_eos=True
    )
    async with await engine.submit(request) as stream:
        assert stream.num_prompt_tokens == 100
        return [event async for event in stream]


async def test_a_stream_carries_the_answer_of_the_engine_alone(engine: AsyncEngine) -> None:
    events = await read(engine, 1, 20)
    assert ids_of(events) == solo_ids(1, 20)
    assert summary_of(events).finish_reasons == (FinishReason.LENGTH,)
    await idle(engine)
    assert engine.stats().is_alive


async def test_many_streams_at_once_each_get_their_own_answer(engine: AsyncEngine) -> None:
    answers = await asyncio.gather(*(read(engine, seed, 15) for seed in range(6)))
    for seed, events in enumerate(answers):
        assert ids_of(events) == solo_ids(seed, 15)
        summary_of(events)
    await idle(engine)


async def test_a_reader_that_leaves_ends_its_request_and_no_other(
    engine: AsyncEngine, recorder: Recorder
) -> None:
    neighbour = asyncio.create_task(read(engine, 2, 60))
    request = make_request(_PROMPT, _COMPRESSION, max_new_tokens=1_500, ignore_eos=True)
    async with await engine.submit(request) as stream:
        async for _ in stream:
            break
    assert ids_of(await neighbour) == solo_ids(2, 60)
    await idle(engine)
    assert sorted(recorder.reasons()) == [FinishReason.ABORT, FinishReason.LENGTH]
    assert all(summary.num_output_tokens < 1_500 for summary in recorder.summaries)


async def test_a_cancelled_reader_frees_the_kv(engine: AsyncEngine, recorder: Recorder) -> None:
    task = asyncio.create_task(read(engine, 3, 1_500))
    for _ in range(2_000):
        if engine.stats().kv_bytes:
            break
        await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await idle(engine)
    assert recorder.reasons() == [FinishReason.ABORT]


async def test_closing_twice_and_after_the_end_is_harmless(engine: AsyncEngine) -> None:
    stream = await engine.submit(make_request(_PROMPT, _COMPRESSION, max_new_tokens=2))
    events = [event async for event in stream]
    await stream.aclose()
    await stream.aclose()
    assert text_of(events) is not None
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_a_bad_request_is_refused_at_once_and_the_next_one_works(
    engine: AsyncEngine,
) -> None:
    for prompt in ("", (260,), (-1,)):
        with pytest.raises(InvalidParameterError):
            await engine.submit(make_request(prompt, _COMPRESSION))
    assert ids_of(await read(engine, 1, 20)) == solo_ids(1, 20)


async def test_more_than_fits_is_refused_and_accepted_again_later(engine: AsyncEngine) -> None:
    streams = [
        await engine.submit(
            make_request(_PROMPT, _COMPRESSION, max_new_tokens=1_500, ignore_eos=True)
        )
        for _ in range(7)
    ]
    with pytest.raises(QueueFullError) as refused:
        await engine.submit(make_request(_PROMPT, _COMPRESSION, max_new_tokens=2))
    assert refused.value.retry_after_s > 0
    for stream in streams:
        await stream.aclose()
    assert ids_of(await read(engine, 1, 20)) == solo_ids(1, 20)
    await idle(engine)


async def test_a_doubled_request_id_fails_and_spares_the_first(engine: AsyncEngine) -> None:
    request = make_request(_PROMPT, _COMPRESSION, max_new_tokens=40, ignore_eos=True)
    first = await engine.submit(request)
    async with await engine.submit(request) as second:
        refused = [event async for event in second]
    assert refused[-1].finish_reason is FinishReason.ERROR
    assert refused[-1].error is not None
    events = [event async for event in first]
    assert ids_of(events) == solo_ids(1, 40)


async def test_leaving_a_doubled_request_id_spares_the_first(engine: AsyncEngine) -> None:
    request = make_request(_PROMPT, _COMPRESSION, max_new_tokens=40, ignore_eos=True)
    first = await engine.submit(request)
    second = await engine.submit(request)
    await second.aclose()
    async with asyncio.timeout(20):
        events = [event async for event in first]
    assert ids_of(events) == solo_ids(1, 40)


async def test_stop_gives_every_stream_its_end_and_refuses_new_ones() -> None:
    engine = AsyncEngine(make_engine(build_model("llama", 2, seed=51), max_num_seqs=2))
    engine.start()
    streams = [
        await engine.submit(
            make_request(_PROMPT, _COMPRESSION, max_new_tokens=1_500, ignore_eos=True)
        )
        for _ in range(4)
    ]
    await anext(streams[0])
    await asyncio.to_thread(engine.stop)
    for stream in streams:
        async with asyncio.timeout(10):
            events = [event async for event in stream]
        assert events[-1].finish_reason is FinishReason.ERROR
        assert events[-1].summary is not None
    assert not engine.stats().is_alive
    with pytest.raises(EngineStoppedError):
        await engine.submit(make_request("hi"))


async def test_an_engine_that_was_never_started_refuses() -> None:
    engine = AsyncEngine(make_engine(build_model("llama", 2, seed=51)))
    with pytest.raises(EngineStoppedError):
        await engine.submit(make_request("hi"))
    engine.stop()


# ---------------------------------------------------------------------- requests the engine fails


async def test_stopping_tells_what_each_request_had_and_how_long_it_took(
    engine: AsyncEngine, recorder: Recorder
) -> None:
    """The observer, the metrics and the log would otherwise know of requests without a second."""
    request = make_request(_PROMPT, _COMPRESSION, max_new_tokens=400, ignore_eos=True)
    events = []
    async with await engine.submit(request) as stream:
        async for event in stream:
            events.append(event)
            if len(events) == 3:
                await asyncio.to_thread(engine.stop)
    (summary,) = recorder.summaries
    assert summary == summary_of(events)
    assert summary.finish_reasons == (FinishReason.ERROR,)
    assert summary.num_output_tokens == len(ids_of(events)) >= 3
    assert summary.timings.total_ms > summary.timings.time_to_first_token_ms > 0


async def test_a_request_still_in_the_inbox_is_ended_with_its_waiting_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was submitted, and the engine died before it looked."""
    inner = make_engine(build_model("llama", 2, seed=51))
    is_stepping, may_die = threading.Event(), threading.Event()

    def die() -> list[TokenEvent]:
        is_stepping.set()
        may_die.wait(10)
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(inner, "step", die)
    engine = AsyncEngine(inner)
    engine.start()
    first = await engine.submit(make_request(_PROMPT, _COMPRESSION, max_new_tokens=4))
    assert await asyncio.to_thread(is_stepping.wait, 10)
    second = await engine.submit(make_request(_PROMPT, _COMPRESSION, max_new_tokens=4))
    await asyncio.sleep(0.05)
    may_die.set()
    for stream in (first, second):
        (event,) = [event async for event in stream]
        assert event.finish_reason is FinishReason.ERROR
        assert event.summary is not None
        assert event.summary.num_prompt_tokens == 100
        assert event.summary.timings.total_ms >= 50
    await asyncio.to_thread(engine.stop)
    assert not engine.stats().is_alive
    with pytest.raises(EngineStoppedError):
        await engine.submit(make_request(_PROMPT, _COMPRESSION, max_new_tokens=4))


async def test_a_step_that_hangs_does_not_outlast_a_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine looks at deadlines between its steps; the reader does not wait for it."""
    monkeypatch.setattr("snapkv_core.engine.response_stream._HUNG_STEP_S", 0.1)
    inner = make_engine(build_model("llama", 2, seed=51))
    may_go_on = threading.Event()
    step = inner.step

    def hang() -> list[TokenEvent]:
        may_go_on.wait(10)
        return step()

    monkeypatch.setattr(inner, "step", hang)
    engine = AsyncEngine(inner)
    engine.start()
    request = replace(
        make_request(_PROMPT, _COMPRESSION, max_new_tokens=4, ignore_eos=True), timeout_s=0.2
    )
    start_s = time.monotonic()
    (event,) = [event async for event in await engine.submit(request)]
    assert 0.3 <= time.monotonic() - start_s < 5.0
    assert event.finish_reason is FinishReason.DEADLINE
    assert event.summary is not None
    assert event.summary.timings.total_ms >= 300
    may_go_on.set()
    await idle(engine)
    await asyncio.to_thread(engine.stop)


# ---------------------------------------------------------------------- tokenising


@pytest.fixture
async def tokenising() -> AsyncIterator[tuple[AsyncEngine, threading.Event]]:
    """Start an engine all of whose tokenising threads are busy until the event is set."""
    engine = AsyncEngine(make_engine(build_model("llama", 2, seed=51)))
    engine.start()
    may_go_on = threading.Event()
    for _ in range(engine._tokenisers._max_workers):
        engine._tokenisers.submit(may_go_on.wait, 10)
    yield engine, may_go_on
    may_go_on.set()
    await asyncio.to_thread(engine.stop)


async def test_waiting_for_a_thread_that_tokenises_counts(
    tokenising: tuple[AsyncEngine, threading.Event],
) -> None:
    """From submission on, whatever keeps the threads busy; and the request is seen to wait."""
    engine, may_go_on = tokenising
    request = make_request(_PROMPT, _COMPRESSION, max_new_tokens=2, ignore_eos=True)
    submitted = asyncio.create_task(engine.submit(request))
    await asyncio.sleep(0.3)
    assert engine.stats().num_waiting == 1
    may_go_on.set()
    events = [event async for event in await submitted]
    assert summary_of(events).timings.queue_ms >= 250
    await idle(engine)


async def test_a_deadline_holds_while_others_are_tokenised(
    tokenising: tuple[AsyncEngine, threading.Event],
) -> None:
    engine, _ = tokenising
    request = replace(make_request(_PROMPT, _COMPRESSION, max_new_tokens=2), timeout_s=0.2)
    start_s = time.monotonic()
    with pytest.raises(DeadlineExceededError):
        await engine.submit(request)
    assert 0.2 <= time.monotonic() - start_s < 5.0
    assert engine.stats().num_waiting == 0


async def test_a_thread_that_tokenises_keeps_its_place_when_its_caller_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Callers that come and go must not start more work than the queue is long."""
    inner = make_engine(build_model("llama", 2, seed=51))
    prepare, may_go_on = inner.prepare, threading.Event()

    def hold(request: GenerationRequest, arrival_s: float | None = None) -> tuple[Sequence, ...]:
        may_go_on.wait(10)
        return prepare(request, arrival_s)

    monkeypatch.setattr(inner, "prepare", hold)
    engine = AsyncEngine(inner)
    engine.start()
    caller = asyncio.create_task(engine.submit(make_request(_PROMPT, _COMPRESSION)))
    await asyncio.sleep(0.1)
    caller.cancel()
    await asyncio.sleep(0.1)
    assert engine.stats().num_waiting == 1
    may_go_on.set()
    await idle(engine)
    await asyncio.to_thread(engine.stop)
