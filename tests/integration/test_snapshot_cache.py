"""Equal prompts are read once: in one process, through a store in several, and whatever it does."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest

from snapkv_core import AsyncEngine, CompressionConfig, GenerationRequest, SamplingParams
from snapkv_core.engine.snapshot_cache import SnapshotCache, SnapshotPolicy
from snapkv_core.engine.snapshot_model import snapshot_model
from snapkv_core.errors import DeadlineExceededError, StoreError
from snapkv_core.kv_cache.circuit_breaker import CircuitBreaker
from snapkv_core.kv_cache.store import KVStore, MemoryStore
from tests.support.app_client import until
from tests.support.engines import make_engine
from tests.support.models import build_model, random_prompt

KNOBS = CompressionConfig(max_capacity_prompt=24, window_size=8, kernel_size=3)
PROMPT = tuple(random_prompt(150, seed=1))
POLICY = SnapshotPolicy(min_prompt_tokens=32, lookup_timeout_s=0.5)


@cache
def model() -> Any:
    """Build one model for all engines: they stand for replicas."""
    return build_model("llama", 2, seed=21)


@dataclass
class Seen:
    """Notes what a cache and an engine do."""

    lookups: list[str] = field(default_factory=list)
    writes: list[str] = field(default_factory=list)
    num_prefill_tokens: float = 0.0

    def on_lookup(self, outcome: str, seconds: float, num_bytes: int) -> None:
        """Note a lookup."""
        assert seconds >= 0
        assert (num_bytes > 0) == (outcome == "hit")
        self.lookups.append(outcome)

    def on_write(self, outcome: str, seconds: float, num_bytes: int) -> None:
        """Note a write."""
        del seconds, num_bytes
        self.writes.append(outcome)

    def on_step(self, step: Any) -> None:
        """Count what was read."""
        self.num_prefill_tokens += step.num_prefill_tokens

    def on_prompt_compressed(self, *_: object) -> None:
        """Nothing to note."""

    def on_request_finished(self, *_: object) -> None:
        """Nothing to note."""


@dataclass
class Replica:
    """An engine with its cache."""

    engine: AsyncEngine
    cache: SnapshotCache
    seen: Seen

    async def ask(
        self,
        prompt: tuple[int, ...] = PROMPT,
        *,
        name: str = "r",
        namespace: str | None = "tenant",
        knobs: CompressionConfig = KNOBS,
        explain: bool = False,
        timeout_s: float | None = None,
    ) -> tuple[str, tuple[int, ...], Any]:
        """Return what a snapshot did, the answer's tokens, and the report."""
        request = GenerationRequest(
            name,
            prompt,
            SamplingParams(max_new_tokens=8, ignore_eos=True),
            knobs,
            explain,
            timeout_s,
            namespace,
        )
        tokens: tuple[int, ...] = ()
        async with await self.engine.submit(request) as stream:
            async for event in stream:
                tokens += event.token_ids
                if event.summary is not None:
                    assert event.summary.snapshot == stream.snapshot
                    return stream.snapshot, tokens, event.summary.compression
        raise AssertionError("the stream ended without a summary")


@asynccontextmanager
async def replica(
    store: KVStore, policy: SnapshotPolicy = POLICY, breaker: CircuitBreaker | None = None
) -> AsyncIterator[Replica]:
    """Run an engine over a store."""
    seen = Seen()
    engine = make_engine(model(), prefill_chunk_tokens=32)
    engine.observer = seen
    # A tiny model reads faster than any store answers.
    described = replace(snapshot_model(engine, "weights-1"), expected_prefill_s=lambda _num: 60.0)
    snapshots = SnapshotCache(store, described, policy, seen, breaker)
    front = AsyncEngine(engine, snapshots)
    front.start()
    try:
        yield Replica(front, snapshots, seen)
    finally:
        await asyncio.to_thread(front.stop)
        engine.check_integrity()
        assert engine.kv_bytes == 0


async def until_written(seen: Seen, num: int = 1) -> None:
    """Wait for writes in the background."""
    await until(lambda: len(seen.writes) >= num)


async def test_the_second_time_a_prompt_comes_out_of_the_store() -> None:
    store = MemoryStore(10**9)
    async with replica(store) as one:
        first = await one.ask(explain=True)
        await until_written(one.seen)
        second = await one.ask(explain=True)
    assert (first[0], second[0]) == ("stored", "hit")
    assert first[1:] == second[1:]
    assert one.seen.num_prefill_tokens == len(PROMPT)
    assert (one.seen.lookups, one.seen.writes) == (["miss", "hit"], ["stored"])


async def test_another_replica_finds_what_one_has_read() -> None:
    store = MemoryStore(10**9)
    async with replica(store) as one, replica(store) as other:
        first = await one.ask()
        await until_written(one.seen)
        second = await other.ask()
    assert second == ("hit", *first[1:])
    assert other.seen.num_prefill_tokens == 0


async def test_eight_equal_prompts_at_once_are_read_once() -> None:
    async with replica(MemoryStore(10**9)) as one:
        answers = await asyncio.gather(*(one.ask(name=f"r{index}") for index in range(8)))
        assert one.seen.num_prefill_tokens == len(PROMPT)
        assert one.seen.lookups == ["miss"]
    assert sorted(use for use, _, _ in answers) == ["hit"] * 7 + ["stored"]
    assert len({tokens for _, tokens, _ in answers}) == 1


async def test_waiting_requests_go_on_when_the_one_that_reads_is_gone() -> None:
    """Its caller leaves: the next one reads, and the rest wait for that."""
    async with replica(MemoryStore(10**9)) as one:
        leader = asyncio.create_task(one.ask(tuple(random_prompt(400, seed=3)), name="leader"))
        await asyncio.sleep(0)
        followers = [
            asyncio.create_task(one.ask(tuple(random_prompt(400, seed=3)), name=f"f{index}"))
            for index in range(3)
        ]
        await until(lambda: bool(one.seen.lookups))
        leader.cancel()
        uses = sorted(use for use, _, _ in await asyncio.gather(*followers))
    assert uses in (["hit", "hit", "stored"], ["hit"] * 3)


async def test_a_waiting_request_whose_time_is_up_ends() -> None:
    """The one that reads takes longer than the other may."""
    may_answer = threading.Event()

    class Slow(MemoryStore):
        def get(self, namespace: str, key: str) -> bytes | None:
            """Take as long as the test says."""
            may_answer.wait(10)
            return super().get(namespace, key)

    async with replica(Slow(10**9), replace(POLICY, lookup_timeout_s=10.0)) as one:
        leader = asyncio.create_task(one.ask(name="leader"))
        await asyncio.sleep(0.05)
        with pytest.raises(DeadlineExceededError):
            await one.ask(name="hurried", timeout_s=0.1)
        assert not leader.done()
        may_answer.set()
        assert (await leader)[0] == "stored"


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
        await until_written(one.seen)
        assert (await one.ask(**change))[0] == "stored"


async def test_requests_without_a_tenant_and_short_prompts_keep_out() -> None:
    async with replica(MemoryStore(10**9)) as one:
        assert (await one.ask(namespace=None))[0] == "off"
        assert (await one.ask(PROMPT[:31]))[0] == "off"
    assert (one.seen.lookups, one.seen.writes) == ([], [])


class FaultyStore(MemoryStore):
    """Does what a test says."""

    def __init__(self) -> None:
        super().__init__(10**9)
        self.released = threading.Event()
        self.fault = ""

    def get(self, namespace: str, key: str) -> bytes | None:
        """Return a blob, or go wrong."""
        if self.fault == "down":
            raise StoreError("faulty", "no connection")
        if self.fault == "hangs":
            self.released.wait(60)
        if self.fault == "bug":
            raise ZeroDivisionError
        blob = super().get(namespace, key)
        if blob is not None and self.fault == "flipped":
            return blob[:-5] + bytes([blob[-5] ^ 1]) + blob[-4:]
        if blob is not None and self.fault == "truncated":
            return blob[:-1]
        return blob

    def put(self, namespace: str, key: str, blob: bytes) -> None:
        """Keep a blob, or refuse it."""
        if self.fault in ("down", "full"):
            raise StoreError("faulty", "no room")
        if self.fault == "hangs on put":
            self.released.wait(60)
        super().put(namespace, key, blob)


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
        await until_written(one.seen)
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
        await until_written(one.seen)
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
                await until_written(one.seen, seed + 1)
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
        await until_written(one.seen)
        one.cache.speed.bytes_per_s = 1.0
        assert (await one.ask())[0] == "off"
    assert one.seen.lookups == ["miss"]


async def test_equal_prompts_at_once_are_read_once_however_slow_the_store_is() -> None:
    async with replica(MemoryStore(10**9)) as one:
        one.cache.speed.observe_hit(num_bytes=1, seconds=60.0)
        answers = await asyncio.gather(*(one.ask(name=f"r{index}") for index in range(4)))
        assert one.seen.num_prefill_tokens == len(PROMPT)
    assert sorted(use for use, _, _ in answers) == ["hit"] * 3 + ["off"]
    assert (one.seen.lookups, one.seen.writes) == ([], [])


async def test_prompts_that_keep_too_much_stay_out() -> None:
    policy = replace(POLICY, max_snapshot_bytes=1)
    async with replica(MemoryStore(10**9), policy) as one:
        assert (await one.ask())[0] == "off"
    assert one.seen.lookups == []


async def test_writes_that_would_pile_up_are_dropped() -> None:
    policy = replace(POLICY, max_pending_bytes=0)
    async with replica(MemoryStore(10**9), policy) as one:
        await one.ask()
        await until_written(one.seen)
    assert one.seen.writes == ["dropped"]


async def test_writing_keeps_its_pace_and_closing_does_not_wait_for_it() -> None:
    """Two snapshots of about 12 kB at 1 kB/s: the second one waits, and is given up."""
    policy = replace(POLICY, max_write_bytes_per_s=1_000.0)
    async with replica(MemoryStore(10**9), policy) as one:
        await one.ask()
        await until_written(one.seen)
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
        await until_written(one.seen)
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
            await until_written(seen)
        await asyncio.to_thread(front.stop)
    assert uses == ["stored", "stored", "hit"]
