"""Snapshots over HTTP: the first token of a hit against a miss, and a store that goes away."""

import asyncio
import itertools
import json
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

import httpx

from benchmarks.completions import TIMEOUT, sse_data
from benchmarks.errors import BenchmarkError
from benchmarks.figures import Latency
from benchmarks.workload import SNAPKV_FIELDS, words

_ANSWER_TOKENS: Final = 8
_STORED_WITHIN_S: Final = 60.0
_REDIS_WITHIN_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class HitFigure:
    """Prompts that are sent twice, the second time when their snapshot is stored.

    Attributes:
        prompt_tokens: Tokens of each, as the server counts.
        miss_ttft_s: Time to first token of each the first time, seconds.
        hit_ttft_s: The same the second time.
        miss_over_hit: Median of the first over median of the second.
    """

    prompt_tokens: int
    miss_ttft_s: list[float]
    hit_ttft_s: list[float]
    miss_over_hit: float


@dataclass(frozen=True, slots=True)
class PhaseFigure:
    """Some clients while the store is in one state.

    Attributes:
        store: `up`, `hangs`, `down` or `back`.
        seconds: How long.
        num_requests: Requests that began in that time.
        num_failed: Those that had no whole answer.
        ttft: Time to first token of the others.
        snapshots: How often each use was reported.
    """

    store: str
    seconds: float
    num_requests: int
    num_failed: int
    ttft: Latency
    snapshots: dict[str, int]


@dataclass(slots=True)
class _Seen:
    num_failed: int = 0
    ttfts_s: list[float] = field(default_factory=list)
    snapshots: Counter[str] = field(default_factory=Counter)


class RedisServer:
    """A redis-server of one's own, which can be made to hang, stopped and started again."""

    def __init__(self, program: str, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port: int = probe.getsockname()[1]
        self._command = [program, "--port", str(self._port), "--save", "", "--dir", str(folder)]
        self.url = f"valkey://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and return when it listens.

        Raises:
            BenchmarkError: It cannot be run, or does not listen.
        """
        try:
            self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        except OSError as error:
            raise BenchmarkError(f"{self._command[0]} cannot be run: {error}") from error
        give_up_s = time.monotonic() + _REDIS_WITHIN_S
        while time.monotonic() < give_up_s:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self._port)) == 0:
                    return
            time.sleep(0.05)
        raise BenchmarkError("redis-server does not listen")

    def hang(self) -> None:
        """Let it hold connections and answer nothing."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        """End it at once, hanging or not."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextmanager
def redis_store(program: str, folder: Path) -> Iterator[RedisServer]:
    """Run a redis-server that keeps nothing on disk."""
    server = RedisServer(program, folder)
    server.start()
    try:
        yield server
    finally:
        server.kill()


async def measure_hits(url: str, *, num_words: int, rounds: int) -> HitFigure:
    """Send prompts twice, one after the other.

    Args:
        url: The server.
        num_words: Words of each prompt, about a token each.
        rounds: Prompts.

    Raises:
        BenchmarkError: A request failed, or the second one was no hit.
    """
    misses, hits, num_tokens = [], [], 0
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT) as client:
        await _ask(client, words(64, 999))
        for variant in range(rounds):
            prompt = words(num_words, variant)
            first = await _ask(client, prompt)
            await _until_stored(client, variant + 1)
            second = await _ask(client, prompt)
            if (first.snapshot, second.snapshot) != ("stored", "hit"):
                found = f"{first.snapshot}, {second.snapshot}"
                raise BenchmarkError(f"expected stored, hit; got {found}")
            misses.append(first.ttft_s)
            hits.append(second.ttft_s)
            num_tokens = second.num_tokens
    return HitFigure(num_tokens, misses, hits, median(misses) / median(hits))


async def measure_outage(
    url: str, redis: RedisServer, *, num_clients: int, num_words: int, phase_s: float
) -> list[PhaseFigure]:
    """Keep clients busy while the store works, hangs, is gone, and is back.

    Args:
        url: The server.
        redis: Its store.
        num_clients: Clients that send one request after the other.
        num_words: Words of each prompt; a few prompts come again and again.
        phase_s: Seconds of each state.
    """
    figures = []
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT) as client:
        for store, change in (
            ("up", None),
            ("hangs", redis.hang),
            ("down", redis.kill),
            ("back", redis.start),
        ):
            if change is not None:
                await asyncio.to_thread(change)
            seen = _Seen()
            ends_s = time.monotonic() + phase_s
            busy = (
                _keep_busy(client, number, num_words, ends_s, seen) for number in range(num_clients)
            )
            await asyncio.gather(*busy)
            figures.append(
                PhaseFigure(
                    store=store,
                    seconds=phase_s,
                    num_requests=seen.num_failed + len(seen.ttfts_s),
                    num_failed=seen.num_failed,
                    ttft=Latency.of_seconds(seen.ttfts_s),
                    snapshots=dict(seen.snapshots),
                )
            )
    return figures


@dataclass(frozen=True, slots=True)
class _Answer:
    ttft_s: float
    snapshot: str
    num_tokens: int


async def _ask(client: httpx.AsyncClient, prompt: str) -> _Answer:
    body = {
        "prompt": prompt,
        "max_new_tokens": _ANSWER_TOKENS,
        "ignore_eos": True,
        "stream": True,
        **SNAPKV_FIELDS,
    }
    sent_s = time.perf_counter()
    ttft_s = None
    try:
        async with client.stream("POST", "/generate", json=body) as answer:
            if answer.status_code != httpx.codes.OK:
                text = (await answer.aread()).decode(errors="replace")
                raise BenchmarkError(f"the server answered {answer.status_code}: {text[:300]}")
            async for data in sse_data(answer.aiter_lines()):
                ttft_s = ttft_s or time.perf_counter() - sent_s
                event: dict[str, Any] = {} if data == "[DONE]" else json.loads(data)
                if "usage" in event:
                    return _Answer(ttft_s, event["snapshot"], event["usage"]["prompt_tokens"])
                if "error" in event:
                    raise BenchmarkError(f"the server failed a request: {event['error']}")
    except httpx.HTTPError as error:
        raise BenchmarkError(f"the server: {error!r}") from error
    raise BenchmarkError("a stream ended before its end")


async def _keep_busy(
    client: httpx.AsyncClient, number: int, num_words: int, ends_s: float, seen: _Seen
) -> None:
    for turn in itertools.count():
        if time.monotonic() >= ends_s:
            return
        try:
            # Half of the prompts were there before, half are new.
            variant = turn % 3 if turn % 2 else 1_000 * (number + 1) + turn
            answer = await _ask(client, words(num_words, variant))
        except BenchmarkError:
            seen.num_failed += 1
        else:
            seen.ttfts_s.append(answer.ttft_s)
            seen.snapshots[answer.snapshot] += 1


async def _until_stored(client: httpx.AsyncClient, num: int) -> None:
    give_up_s = time.monotonic() + _STORED_WITHIN_S
    line = 'snapkv_snapshot_writes_total{outcome="stored"} '
    while time.monotonic() < give_up_s:
        page: Sequence[str] = (await client.get("/metrics")).text.splitlines()
        if any(row.startswith(line) and float(row.removeprefix(line)) >= num for row in page):
            return
        await asyncio.sleep(0.05)
    raise BenchmarkError("nothing was stored")
