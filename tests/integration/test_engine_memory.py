"""Pages are counted exactly, for one request, for several choices, and in what the engine says."""

import asyncio
import math
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from snapkv_core import (
    AsyncEngine,
    CompressionConfig,
    Engine,
    QueueFullError,
    RequestTooLargeError,
)
from tests.support.engines import FULL, ask, drain, make_engine, make_request
from tests.support.models import build_model, random_prompt

#: 4 layers, 2 KV heads of 16 numbers in float32, pages of 8 tokens.
_ROWS = 4 * 2
_PAGE = 8
_PAGE_BYTES = _PAGE * 2 * 16 * 4
_KEPT_27 = CompressionConfig(max_capacity_prompt=27, window_size=8, kernel_size=3)
_PROMPT = random_prompt(60, seed=1)


def new_engine(**settings: Any) -> Engine:
    """Build an engine with small pages."""
    return make_engine(build_model("llama", 2, seed=31), page_size=_PAGE, **settings)


def pages_at_worst(num_kept: int, max_new_tokens: int, n: int) -> int:
    """Count the pages of one layer and head token by token, as the longest answers fill them."""
    pages: set[tuple[int, int]] = set()
    for choice in range(n):
        for token in range(num_kept + max_new_tokens):
            page = token // _PAGE
            is_shared = (page + 1) * _PAGE <= num_kept
            pages.add((-1 if is_shared else choice, page))
    return len(pages)


@pytest.mark.parametrize(
    ("compression", "num_kept", "max_new_tokens", "n"),
    [(FULL, 60, 20, 1), (FULL, 60, 20, 3), (_KEPT_27, 27, 70, 1), (_KEPT_27, 27, 14, 4)],
)
def test_a_request_that_never_fits_is_refused_with_both_sizes(
    compression: CompressionConfig, num_kept: int, max_new_tokens: int, n: int
) -> None:
    needed = _ROWS * pages_at_worst(num_kept, max_new_tokens, n)
    request = make_request(
        _PROMPT, compression, max_new_tokens=max_new_tokens, n=n, ignore_eos=True
    )
    # A whole page less than needed, and not a byte more than makes no page.
    small = new_engine(kv_cache_bytes=needed * _PAGE_BYTES - 1)
    with pytest.raises(RequestTooLargeError) as refused:
        small.add_request(request)
    assert refused.value.needed_bytes == needed * _PAGE_BYTES
    assert refused.value.available_bytes == (needed - 1) * _PAGE_BYTES
    assert str(refused.value.needed_bytes) in str(refused.value)
    assert str(refused.value.available_bytes) in str(refused.value)
    assert refused.value.field == ("prompt" if compression is FULL else "max_capacity_prompt")
    assert not small.has_work
    assert ask(small, _PROMPT[:5], max_new_tokens=2).texts

    enough = new_engine(kv_cache_bytes=needed * _PAGE_BYTES)
    assert enough.generate(request).summary.num_output_tokens == n * max_new_tokens


def test_choices_share_the_pages_of_the_prompt_and_no_more() -> None:
    engine = new_engine()
    engine.add_request(make_request(_PROMPT, _KEPT_27, max_new_tokens=10, n=3, ignore_eos=True))
    while not engine.step():
        pass
    used = []
    while engine.has_work:
        used.append(engine.parts.manager.num_pages_used)
        assert engine.parts.ledger.num_pages_reserved == _ROWS * pages_at_worst(27, 10, 3)
        engine.step()
        engine.check_integrity()
    # 27 tokens are three full pages and an open one, which 5 more tokens fill.
    assert used == [_ROWS * (3 + 3)] * 6 + [_ROWS * (3 + 6)] * 3
    assert engine.parts.manager.num_pages_used == 0
    assert engine.parts.ledger.num_pages_reserved == 0


def test_requests_wait_for_memory_and_all_are_served() -> None:
    # Room for two at once of what takes (27 + 20) / 8 = 6 pages in each layer and head.
    engine = new_engine(kv_cache_bytes=2 * 6 * _ROWS * _PAGE_BYTES)
    for seed in range(5):
        engine.add_request(
            make_request(random_prompt(60, seed=seed), _KEPT_27, max_new_tokens=20, ignore_eos=True)
        )
    most, num_ends = 0, 0
    while engine.has_work:
        num_ends += sum(event.summary is not None for event in engine.step())
        engine.check_integrity()
        most = max(most, engine.num_running)
    assert (most, num_ends) == (2, 5)


class Gate:
    """Holds an engine's thread in front of its n-th decode batch until it is opened."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch, hold_at: int) -> None:
        self.is_held = threading.Event()
        self._is_open = threading.Event()
        self._left = hold_at
        self._run_batch = engine.parts.runner.run_batch
        monkeypatch.setattr(engine.parts.runner, "run_batch", self.run_batch)

    def run_batch(self, batch: Any, sequences: Any) -> Any:
        """Wait once, then run."""
        self._left -= 1
        if self._left == 0:
            self.is_held.set()
            assert self._is_open.wait(20)
        return self._run_batch(batch, sequences)

    def open(self) -> None:
        """Let the engine go on."""
        self._is_open.set()


@pytest.fixture
async def running(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[AsyncEngine, Gate]]:
    """Start an engine with two places whose thread stops before the third decode batch."""
    inner = new_engine(max_num_seqs=2, max_num_waiting=1)
    gate = Gate(inner, monkeypatch, hold_at=3)
    engine = AsyncEngine(inner)
    engine.start()
    yield engine, gate
    gate.open()
    await asyncio.to_thread(engine.stop)


async def test_stats_are_exact_while_running_and_zero_when_idle(
    running: tuple[AsyncEngine, Gate],
) -> None:
    engine, gate = running
    before = engine.stats()
    assert (before.num_waiting, before.num_running, before.num_pages_used) == (0, 0, 0)
    assert before.last_step_age_s == 0.0
    request = make_request(_PROMPT, _KEPT_27, max_new_tokens=10, n=2, ignore_eos=True)
    stream = await engine.submit(request)
    await asyncio.to_thread(gate.is_held.wait, 20)
    waiting = await engine.submit(make_request(_PROMPT, _KEPT_27, max_new_tokens=2))

    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (2, 1)
    # Two decode batches are done: 29 tokens, three shared pages and one of each choice.
    assert stats.num_pages_used == _ROWS * (3 + 2)
    assert stats.num_pages_reserved == _ROWS * pages_at_worst(27, 10, 2)
    assert stats.page_bytes == _PAGE_BYTES
    assert stats.kv_bytes == stats.num_pages_used * _PAGE_BYTES
    assert stats.num_pages_total == _ROWS * 2 * math.ceil(2_048 / _PAGE)
    assert stats.workspace_bytes == 0
    assert stats.device_memory_bytes > 10_000_000
    assert stats.last_step_age_s > 0.0
    assert stats.is_alive

    gate.open()
    for each in (stream, waiting):
        async for _ in each:
            pass
    async with asyncio.timeout(20):
        # The engine's thread sets no event.
        while engine.stats().num_running or engine.stats().last_step_age_s:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    after = engine.stats()
    assert (after.num_waiting, after.num_running) == (0, 0)
    assert (after.kv_bytes, after.num_pages_used, after.num_pages_reserved) == (0, 0, 0)
    assert (after.workspace_bytes, after.last_step_age_s) == (0, 0.0)
    assert after.is_alive


async def test_a_full_queue_says_how_long_a_place_has_taken(
    running: tuple[AsyncEngine, Gate], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, gate = running
    times = iter([17.0, 1.0])
    monkeypatch.setattr(engine._service_rate, "retry_after_s", lambda: next(times))
    streams = [
        await engine.submit(make_request(_PROMPT, _KEPT_27, max_new_tokens=9, ignore_eos=True))
        for _ in range(3)
    ]
    with pytest.raises(QueueFullError) as refused:
        await engine.submit(make_request(_PROMPT, _KEPT_27, max_new_tokens=9))
    assert refused.value.retry_after_s == 17.0
    gate.open()
    for stream in streams:
        async for _ in stream:
            pass


async def test_ends_of_requests_are_what_the_wait_is_learnt_from(
    running: tuple[AsyncEngine, Gate], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, gate = running
    gate.open()
    ends: list[float] = []
    monkeypatch.setattr(engine._service_rate, "note_end", ends.append)
    streams = [
        await engine.submit(make_request(_PROMPT, _KEPT_27, max_new_tokens=4, n=n)) for n in (1, 2)
    ]
    for stream in streams:
        async for _ in stream:
            pass
    left = await engine.submit(make_request(_PROMPT, _KEPT_27, max_new_tokens=1_900))
    await anext(left)
    await left.aclose()
    async with asyncio.timeout(20):
        while len(ends) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert ends == sorted(ends)
    assert not drain(engine._engine)


def test_slices_are_one_cell_of_the_grid_at_least_and_memory_is_planned_for_that() -> None:
    engine = new_engine(prefill_chunk_tokens=16)
    assert engine.parts.max_slice_tokens == engine.parts.backend.grid_tokens == 512
    assert new_engine(prefill_chunk_tokens=1_300).parts.max_slice_tokens == 1_024
