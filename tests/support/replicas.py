"""Engines over one model that share a store, and stores that do what a test says."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from snapkv_core import (
    AsyncEngine,
    CompressionConfig,
    GenerationRequest,
    KVStore,
    MemoryStore,
    SamplingParams,
    SnapshotPolicy,
    SnapshotStats,
    StoreError,
)
from snapkv_core.engine.snapshot_cache import SnapshotCache
from snapkv_core.engine.snapshot_model import snapshot_model
from snapkv_core.kv_cache.circuit_breaker import CircuitBreaker
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
    hits: list[tuple[float, int]] = field(default_factory=list)
    num_prefill_tokens: float = 0.0
    is_broken: bool = False

    def on_lookup(self, outcome: str, seconds: float, num_bytes: int) -> None:
        """Note a lookup."""
        if self.is_broken:
            raise ZeroDivisionError
        if outcome == "hit":
            self.hits.append((seconds, num_bytes))
        assert seconds >= 0
        assert (num_bytes > 0) == (outcome == "hit")
        self.lookups.append(outcome)

    def on_write(self, outcome: str, seconds: float, num_bytes: int) -> None:
        """Note a write."""
        if self.is_broken:
            raise ZeroDivisionError
        del seconds, num_bytes
        self.writes.append(outcome)

    def on_step(self, step: Any) -> None:
        """Count what was read."""
        self.num_prefill_tokens += step.num_prefill_tokens

    def on_prompt_compressed(self, *_: object) -> None:
        """Nothing to note."""

    def on_request_finished(self, *_: object) -> None:
        """Nothing to note."""


def request_for(
    prompt: tuple[int, ...],
    *,
    name: str = "r",
    knobs: CompressionConfig = KNOBS,
    max_new_tokens: int = 8,
) -> GenerationRequest:
    """Build a request of the tenant of these tests."""
    sampling = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
    return GenerationRequest(name, prompt, sampling, knobs, snapshot_namespace="tenant")


@dataclass
class Replica:
    """An engine with its cache."""

    engine: AsyncEngine
    cache: SnapshotCache
    seen: Seen

    @property
    def stats(self) -> SnapshotStats:
        """What the cache says of itself."""
        stats = self.engine.stats().snapshots
        assert stats is not None
        return stats

    @property
    def runner(self) -> Any:
        """What runs the model."""
        return self.engine._engine.parts.runner

    async def until_written(self, num: int = 1) -> None:
        """Wait for writes in the background, and until no snapshot is in memory."""
        await until(lambda: len(self.seen.writes) >= num and not self.cache.num_held_bytes)

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
        request = replace(
            request_for(prompt, name=name, knobs=knobs),
            explain=explain,
            timeout_s=timeout_s,
            snapshot_namespace=namespace,
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


class GatedStore(MemoryStore):
    """Answers no lookup before a test lets it; counts those that came."""

    def __init__(self) -> None:
        super().__init__(10**9)
        self.may_answer = threading.Event()
        self.num_asked = 0

    def get(self, namespace: str, key: str) -> bytes | None:
        """Take as long as the test says."""
        self.num_asked += 1
        self.may_answer.wait(60)
        return super().get(namespace, key)
