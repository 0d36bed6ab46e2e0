"""Several tenants at one engine: their turns, their places, and what a size may decide."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest

from snapkv_core import AsyncEngine, GenerationRequest, QueueFullError, RequestSize, ResponseStream
from tests.support.engines import make_engine, make_request
from tests.support.models import build_model, random_prompt


@pytest.fixture
async def engine() -> AsyncIterator[AsyncEngine]:
    """Start an engine that runs one request and lets some wait."""
    inner = make_engine(
        build_model("llama", 2, seed=51),
        max_num_seqs=1,
        max_num_waiting=12,
        default_max_new_tokens=30,
    )
    running = AsyncEngine(inner)
    running.start()
    yield running
    await asyncio.to_thread(running.stop)


def requests_of(tenant: str, length: int, seed: int = 0) -> Iterator[GenerationRequest]:
    """Yield requests without end."""
    while True:
        seed += 1
        request = make_request(random_prompt(20, seed=seed), max_new_tokens=length, ignore_eos=True)
        yield replace(request, tenant=tenant)


async def until_ended(stream: ResponseStream, ended: list[str], name: str) -> None:
    async for _ in stream:
        pass
    ended.append(name)


async def test_another_tenants_only_request_is_answered_early(engine: AsyncEngine) -> None:
    ended: list[str] = []
    many = requests_of("a", 8)
    streams = [(await engine.submit(next(many)), "a") for _ in range(10)]
    streams.append((await engine.submit(next(requests_of("b", 8))), "b"))
    await asyncio.gather(*(until_ended(stream, ended, name) for stream, name in streams))
    # After the one that ran when it came, and one more; how far the first had come is chance.
    assert ended.index("b") < 6, ended
    assert sorted(ended) == ["a"] * 10 + ["b"]


async def test_a_tenant_that_fills_the_room_keeps_nobody_out(engine: AsyncEngine) -> None:
    many, other = requests_of("a", 400), requests_of("b", 5)
    streams = [await engine.submit(next(many)) for _ in range(13)]
    with pytest.raises(QueueFullError):
        await engine.submit(next(many))
    streams.append(await engine.submit(next(other)))
    with pytest.raises(QueueFullError):
        await engine.submit(next(other))
    for stream in streams:
        await stream.aclose()
    async with await engine.submit(next(many)) as stream:
        await anext(stream)


async def test_a_size_that_is_refused_queues_nothing(engine: AsyncEngine) -> None:
    sizes: list[RequestSize] = []

    def refuse(size: RequestSize) -> None:
        sizes.append(size)
        raise LookupError("too large")

    request = make_request(random_prompt(20), max_new_tokens=7)
    with pytest.raises(LookupError, match="too large"):
        await engine.submit(request, refuse)
    assert sizes == [RequestSize(num_prompt_tokens=20, max_new_tokens=7, num_choices=1)]
    assert engine.stats().num_waiting == engine.stats().num_running == 0


@pytest.mark.parametrize(("limit", "length"), [(None, 30), (11, 11), (500, 30)])
async def test_the_default_length_can_be_cut_for_a_request(
    engine: AsyncEngine, limit: int | None, length: int
) -> None:
    sizes: list[RequestSize] = []
    request = replace(
        make_request(random_prompt(20), ignore_eos=True), max_default_new_tokens=limit
    )
    async with await engine.submit(request, sizes.append) as stream:
        ids = [token_id async for event in stream for token_id in event.token_ids]
    assert len(ids) == sizes[0].max_new_tokens == length
