"""Equal prompts at once: the first is looked up and read, and the others wait for what comes."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from snapkv_core import MemoryStore
from snapkv_core.errors import DeadlineExceededError, EngineStoppedError
from tests.support.app_client import until
from tests.support.replicas import POLICY, PROMPT, GatedStore, Replica, replica

#: So that a gated store ends no lookup by its silence.
PATIENT = replace(POLICY, lookup_timeout_s=60.0)


async def followed(
    one: Replica, store: GatedStore, num: int = 3
) -> tuple["asyncio.Task[Any]", list["asyncio.Task[Any]"]]:
    """Return a task whose lookup does not get on, and some that wait for it."""
    leader = asyncio.create_task(one.ask(name="leader"))
    await until(lambda: store.num_asked == 1)
    followers = [asyncio.create_task(one.ask(name=f"f{index}")) for index in range(num)]
    await until(lambda: one.cache.num_waiting == num)
    return leader, followers


async def test_eight_equal_prompts_at_once_are_read_once() -> None:
    async with replica(MemoryStore(10**9)) as one:
        answers = await asyncio.gather(*(one.ask(name=f"r{index}") for index in range(8)))
        assert one.seen.num_prefill_tokens == len(PROMPT)
        assert one.seen.lookups == ["miss"]
    assert sorted(use for use, _, _ in answers) == ["hit"] * 7 + ["stored"]
    assert len({tokens for _, tokens, _ in answers}) == 1


async def test_equal_prompts_at_once_are_read_once_however_slow_the_store_is() -> None:
    async with replica(MemoryStore(10**9)) as one:
        one.cache.speed.observe_hit(num_bytes=1, seconds=60.0)
        answers = await asyncio.gather(*(one.ask(name=f"r{index}") for index in range(4)))
        assert one.seen.num_prefill_tokens == len(PROMPT)
    assert sorted(use for use, _, _ in answers) == ["hit"] * 3 + ["off"]
    assert (one.seen.lookups, one.seen.writes) == ([], [])


async def test_waiting_requests_go_on_when_the_one_that_looks_up_is_gone() -> None:
    """Its caller leaves: the next one looks up and reads, and the rest wait for that."""
    store = GatedStore()
    async with replica(store, PATIENT) as one:
        leader, followers = await followed(one, store)
        leader.cancel()
        await until(lambda: store.num_asked == 2)
        store.may_answer.set()
        uses = sorted(use for use, _, _ in await asyncio.gather(*followers))
        assert uses == ["hit", "hit", "stored"]
        assert one.seen.num_prefill_tokens == len(PROMPT)


async def test_waiting_requests_go_on_when_the_one_that_reads_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step fails while the first one reads; the next one reads again."""
    store = GatedStore()
    async with replica(store, PATIENT) as one:
        leader, followers = await followed(one, store)
        runner = one.runner
        working = runner.run_slice
        num_failures = 0

        def fail_once(*arguments: Any) -> Any:
            nonlocal num_failures
            if not num_failures:
                num_failures += 1
                raise RuntimeError("this step fails")
            return working(*arguments)

        monkeypatch.setattr(runner, "run_slice", fail_once)
        store.may_answer.set()
        assert (await leader)[1] == ()
        uses = sorted(use for use, _, _ in await asyncio.gather(*followers))
    assert num_failures == 1
    assert uses == ["hit", "hit", "stored"]


async def test_waiting_requests_end_with_the_engine() -> None:
    store = GatedStore()
    async with replica(store, PATIENT) as one:
        leader, followers = await followed(one, store)
        stopping = asyncio.create_task(asyncio.to_thread(one.engine.stop))
        await until(lambda: not one.engine.stats().is_alive)
        store.may_answer.set()
        await stopping
        ended = await asyncio.gather(leader, *followers, return_exceptions=True)
    assert all(isinstance(answer, EngineStoppedError) for answer in ended), ended


async def test_a_waiting_request_whose_time_is_up_ends() -> None:
    """The one that looks up takes longer than the other may."""
    store = GatedStore()
    async with replica(store, PATIENT) as one:
        leader = asyncio.create_task(one.ask(name="leader"))
        await until(lambda: store.num_asked == 1)
        with pytest.raises(DeadlineExceededError):
            await one.ask(name="hurried", timeout_s=0.1)
        assert store.num_asked == 1
        assert not leader.done()
        store.may_answer.set()
        assert (await leader)[0] == "stored"


async def test_nothing_is_copied_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that nobody waits for and that is not stored stays where it is."""
    async with replica(MemoryStore(10**9)) as one:
        one.cache.speed.observe_hit(num_bytes=1, seconds=60.0)
        monkeypatch.setattr(one.runner, "snapshot", lambda _: pytest.fail("a copy was made"))
        assert (await one.ask())[0] == "off"
