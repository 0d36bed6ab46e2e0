"""A prompt is not read twice: in one process, through a store in several, whatever that does."""

import asyncio
import socket
import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from app.integrations.snapshot_tiers import open_snapshot_tiers
from snapkv_core import AsyncEngine, MemoryStore
from snapkv_core.kv_cache.circuit_breaker import CircuitBreaker
from tests.support.app_client import settings_for_tests, until
from tests.support.engines import make_engine
from tests.support.models import random_prompt
from tests.support.replicas import (
    KNOBS,
    POLICY,
    PROMPT,
    FaultyStore,
    Replica,
    Seen,
    model,
    replica,
    request_for,
)


async def test_the_second_time_a_prompt_comes_out_of_the_store() -> None:
    store = MemoryStore(10**9)
    async with replica(store) as one:
        first = await one.ask(explain=True)
        await one.until_written()
        second = await one.ask(explain=True)
    assert (first[0], second[0]) == ("stored", "hit")
    assert first[1:] == second[1:]
    assert one.seen.num_prefill_tokens == len(PROMPT)
    assert (one.seen.lookups, one.seen.writes) == (["miss", "hit"], ["stored"])


async def test_another_replica_finds_what_one_has_read() -> None:
    store = MemoryStore(10**9)
    async with replica(store) as one, replica(store) as other:
        first = await one.ask()
        await one.until_written()
        second = await other.ask()
    assert second == ("hit", *first[1:])
    assert other.seen.num_prefill_tokens == 0


@pytest.mark.parametrize(
    "change",
    [
        {"namespace": "another-tenant"},
        {"knobs": replace(KNOBS, kernel_size=5)},
        {"prompt": (*PROMPT[:-1], PROMPT[-1] ^ 1)},
    ],
    ids=["tenant", "knobs", "prompt"],
)
async def test_other_tenants_knobs_and_prompts_find_nothing(change: dict[str, Any]) -> None:
    async with replica(MemoryStore(10**9)) as one:
        await one.ask()
        await one.until_written()
        assert (await one.ask(**change))[0] == "stored"


async def test_requests_without_a_tenant_and_short_prompts_keep_out() -> None:
    async with replica(MemoryStore(10**9)) as one:
        assert (await one.ask(namespace=None))[0] == "off"
        assert (await one.ask(PROMPT[:31]))[0] == "off"
    assert (one.seen.lookups, one.seen.writes) == ([], [])


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        ("down", "failed"),
        ("hangs", "timeout"),
        ("bug", "failed"),
        ("flipped", "rejected"),
        ("truncated", "rejected"),
    ],
)
async def test_whatever_the_store_does_is_a_miss(fault: str, outcome: str) -> None:
    store = FaultyStore()
    async with replica(store) as one:
        expected = await one.ask()
        await one.until_written()
        store.fault = fault
        start_s = time.monotonic()
        use, *answer = await one.ask()
        # Far from both: the lookup ends after half a second, the store that hangs after a minute.
        assert time.monotonic() - start_s < 10.0
        store.released.set()
    assert use == "stored"
    assert tuple(answer) == expected[1:]
    assert one.seen.lookups == ["miss", outcome]


async def test_store_that_takes_nothing_costs_no_answer() -> None:
    store = FaultyStore()
    store.fault = "full"
    async with replica(store) as one:
        assert (await one.ask())[0] == "stored"
        await one.until_written()
    assert one.seen.writes == ["failed"]


async def test_after_three_failures_the_store_is_left_alone() -> None:
    store = FaultyStore()
    store.fault = "down"
    now_s = 0.0
    breaker = CircuitBreaker(clock=lambda: now_s)
    async with replica(store, breaker=breaker) as one:
        uses = []
        for seed in range(5):
            uses.append((await one.ask(tuple(random_prompt(60, seed=seed))))[0])
            if not breaker.is_open:
                await one.until_written(seed + 1)
        assert breaker.is_open
        assert one.seen.lookups[-2:] == ["held_back"] * 2
        assert uses[-1] == "miss"
        store.fault = ""
        now_s = 31.0
        assert (await one.ask())[0] == "stored"
        assert not breaker.is_open


async def test_a_fetch_slower_than_reading_is_not_tried() -> None:
    async with replica(MemoryStore(10**9)) as one:
        await one.ask()
        await one.until_written()
        one.cache.speed.bytes_per_s = 1.0
        assert (await one.ask())[0] == "off"
    assert one.seen.lookups == ["miss"]


async def test_a_prompt_that_is_being_written_is_not_read_again() -> None:
    """What is still in this machine's memory is found there."""
    store = FaultyStore()
    store.fault = "hangs on put"
    async with replica(store) as one:
        first = await one.ask()
        second = await one.ask()
        store.released.set()
    assert (first[0], second[0]) == ("stored", "hit")
    assert first[1:] == second[1:]


async def test_what_is_held_in_memory_is_bounded() -> None:
    """A snapshot that waits for being written leaves no room for another one to be fetched."""
    store = FaultyStore()
    store.fault = "hangs on put"
    async with replica(store, replace(POLICY, max_held_bytes=30_000)) as one:
        assert (await one.ask())[0] == "stored"
        assert one.stats.num_pending_bytes > 10_000
        other = tuple(random_prompt(150, seed=2))
        assert (await one.ask(other))[0] == "off"
        store.released.set()
        await one.until_written()
        await until(lambda: one.stats.num_pending_bytes == 0)
        assert (await one.ask(other))[0] == "stored"


async def test_an_answer_under_way_holds_no_snapshot() -> None:
    """Neither one that was read nor one that was found, for as long as tokens come."""
    async with replica(MemoryStore(10**9)) as one:
        for use in ("stored", "hit"):
            async with await one.engine.submit(request_for(PROMPT, max_new_tokens=200)) as stream:
                await anext(stream)
                assert stream.snapshot == use
                await one.until_written()
                await until(lambda: not one.cache.num_held_bytes)


async def test_8_bits_are_weighed_by_what_they_stand_for() -> None:
    """The pace is that of K and V as the pool has them, however few bytes come."""
    async with replica(MemoryStore(10**9), replace(POLICY, body="int8")) as one:
        await one.ask()
        await one.until_written()
        assert (await one.ask())[0] == "hit"
        ((seconds, num_bytes),) = one.seen.hits
        assert one.stats.fetch_bytes_per_s * seconds > 1.5 * num_bytes


async def test_an_observer_that_fails_changes_nothing() -> None:
    async with replica(MemoryStore(10**9)) as one:
        one.seen.is_broken = True
        first = await one.ask()
        await until(lambda: one.stats.num_pending_bytes == 0)
        second = await one.ask()
    assert (first[0], second[0]) == ("stored", "hit")


async def test_a_store_that_hangs_takes_no_other_with_it() -> None:
    """Memory before a server that takes connections and says nothing."""
    told: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tiers = open_snapshot_tiers(
            settings_for_tests(
                snapshot_memory_bytes=10**9,
                snapshot_valkey_url=f"valkey://127.0.0.1:{silent.getsockname()[1]}",
                snapshot_lookup_timeout_ms=2_000,
            ),
            lambda store, error: told.append(f"{store} {type(error).__name__}"),
        )
        assert tiers is not None
        async with replica(tiers, replace(POLICY, lookup_timeout_s=2.0)) as one:
            for seed in range(5):
                prompt = tuple(random_prompt(60, seed=seed))
                assert (await one.ask(prompt, name=f"r{seed}"))[0] == "stored"
            assert one.seen.lookups == ["miss"] * 5
            assert not one.cache.breaker.is_open
            # Three failed lookups, and nobody waits for it any more.
            assert told.count("valkey StoreHeldBackError") >= 2
            assert (await one.ask(tuple(random_prompt(60, seed=0))))[0] == "hit"


async def test_prompts_that_keep_too_much_stay_out() -> None:
    policy = replace(POLICY, max_snapshot_bytes=1)
    async with replica(MemoryStore(10**9), policy) as one:
        assert (await one.ask())[0] == "off"
    assert one.seen.lookups == []


async def test_writes_that_would_pile_up_are_dropped() -> None:
    policy = replace(POLICY, max_pending_bytes=0)
    async with replica(MemoryStore(10**9), policy) as one:
        await one.ask()
        await one.until_written()
    assert one.seen.writes == ["dropped"]


async def test_writing_keeps_its_pace_and_closing_does_not_wait_for_it() -> None:
    """Two snapshots of about 12 kB at 1 kB/s: the second one waits, and is given up."""
    policy = replace(POLICY, max_write_bytes_per_s=1_000.0)
    async with replica(MemoryStore(10**9), policy) as one:
        await one.ask()
        await one.until_written()
        await one.ask(tuple(random_prompt(150, seed=2)))
        await asyncio.sleep(0.2)
        assert one.seen.writes == ["stored"]
        start_s = time.monotonic()
    assert time.monotonic() - start_s < 2.0
    assert one.seen.writes == ["stored", "dropped"]


async def test_an_engine_stops_while_its_store_hangs() -> None:
    """A server that was told to go must not wait for a write without end."""
    store = FaultyStore()
    async with replica(store) as one:
        store.fault = "hangs on put"
        await one.ask()
        start_s = time.monotonic()
    assert time.monotonic() - start_s < 20.0
    store.released.set()


async def test_an_engine_says_how_fast_its_store_is() -> None:
    async with replica(MemoryStore(10**9)) as one:
        before = one.engine.stats().snapshots
        assert before is not None
        assert (before.round_trip_s, before.fetch_bytes_per_s) == (0.0, 0.0)
        await one.ask()
        await one.until_written()
        await one.ask()
        after = one.engine.stats().snapshots
    assert after is not None
    assert after.round_trip_s > 0
    assert after.fetch_bytes_per_s > 0
    assert after.prefill_tokens_per_s == pytest.approx(4_096 / 60.0)
    assert after.num_pending_bytes == 0
    assert not after.is_held_back


async def test_replicas_of_other_weights_do_not_share() -> None:
    """As the service puts it together: each engine closes the store it was given."""
    blobs = MemoryStore(10**9)

    class Shared(MemoryStore):
        get, put = blobs.get, blobs.put  # what one engine closes is still there for others

    uses = []
    for fingerprint in ("weights-1", "weights-2", "weights-1"):
        seen, front = Seen(), AsyncEngine(make_engine(model(), prefill_chunk_tokens=32))
        policy = replace(POLICY, min_prompt_tokens=32)
        front.use_snapshots(Shared(10**9), fingerprint, policy, seen)
        front.start()
        one = Replica(front, None, seen)  # type: ignore[arg-type]  # the engine has it
        uses.append((await one.ask())[0])
        if uses[-1] == "stored":
            await until(partial(len, seen.writes))
        await asyncio.to_thread(front.stop)
    assert uses == ["stored", "stored", "hit"]
