"""Run mixed requests for a while, some abandoned half-way, and watch memory and leaks.

Run as `python -m benchmarks.soak [--seconds N]`. Exits 1 when KV memory is left over, a request
fails, or resident memory grows by more than the limit after warm-up.
"""

import argparse
import asyncio
import os
import random
import sys
import time
from pathlib import Path
from typing import Final

from rich.console import Console

from snapkv_core import (
    AsyncEngine,
    CompressionConfig,
    EngineConfig,
    GenerationRequest,
    SamplingParams,
)

_NUM_CLIENTS: Final = 8
_MAX_GROWTH_PERCENT_PER_MINUTE: Final = 1.0


async def _client(engine: AsyncEngine, name: str, end_s: float, counts: dict[str, int]) -> None:
    dice = random.Random(name)
    number = 0
    while time.monotonic() < end_s:
        number += 1
        prompt = tuple(dice.randrange(100, 40_000) for _ in range(dice.randrange(8, 600)))
        request = GenerationRequest(
            f"{name}-{number}",
            prompt,
            SamplingParams(max_new_tokens=dice.randrange(1, 32), ignore_eos=True),
            CompressionConfig(
                max_capacity_prompt=dice.choice((32, 128, 512)), window_size=8, kernel_size=3
            ),
        )
        leaves_after = dice.randrange(1, 8) if dice.random() < 0.1 else None
        num_events = 0
        async with await engine.submit(request) as stream:
            async for event in stream:
                num_events += 1
                counts["failed"] += event.error is not None
                if num_events == leaves_after and event.summary is None:
                    counts["abandoned"] += 1
                    break
            else:
                counts["finished"] += 1


def resident_bytes() -> int:
    """Return the resident memory of this process (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def _watch(end_s: float, samples: list[tuple[float, int]]) -> None:
    while time.monotonic() < end_s:
        samples.append((time.monotonic(), resident_bytes()))
        await asyncio.sleep(1)


def growth_percent_per_minute(samples: list[tuple[float, int]]) -> float:
    """Return the least-squares slope of the second half of `samples`, against their mean."""
    settled = samples[len(samples) // 2 :]
    mean_s = sum(at for at, _ in settled) / len(settled)
    mean_bytes = sum(size for _, size in settled) / len(settled)
    spread = sum((at - mean_s) ** 2 for at, _ in settled)
    if spread == 0:
        return 0.0
    slope = sum((at - mean_s) * (size - mean_bytes) for at, size in settled) / spread
    return slope * 60 / mean_bytes * 100


async def soak(engine: AsyncEngine, seconds: float) -> tuple[dict[str, int], float]:
    """Load the engine for `seconds`; returns request counts and memory growth."""
    counts = {"finished": 0, "abandoned": 0, "failed": 0}
    samples: list[tuple[float, int]] = []
    end_s = time.monotonic() + seconds
    clients = [_client(engine, f"client-{index}", end_s, counts) for index in range(_NUM_CLIENTS)]
    await asyncio.gather(_watch(end_s, samples), *clients)
    await asyncio.sleep(2)  # an abandoned request is aborted at the engine's next turn
    return counts, growth_percent_per_minute(samples)


def main() -> int:
    """Soak the demo model and judge the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--seconds", type=float, default=300.0)
    arguments = parser.parse_args()
    engine = AsyncEngine.load(EngineConfig(model=arguments.model))
    engine.start()
    try:
        counts, growth = asyncio.run(soak(engine, arguments.seconds))
        left_over = engine.stats().kv_bytes
    finally:
        engine.stop()
    Console().print(f"{counts}, KV bytes left {left_over}, RSS {growth:+.2f} % a minute")
    is_good = not counts["failed"] and not left_over and growth < _MAX_GROWTH_PERCENT_PER_MINUTE
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
