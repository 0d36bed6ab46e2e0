"""Measures the memory of reading and holding some prompts, in a process of its own per method.

`python -m benchmarks.engine_memory METHOD MODEL DTYPE BATCH TOKENS` prints one JSON object.
A process never gives back all that it once held, so two methods in one process would share a peak.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from app.settings import load_settings
from benchmarks.engine_decode import DecodeRun, dtype_name
from benchmarks.errors import BenchmarkError
from benchmarks.figures import Ratio
from benchmarks.machine import forget_peak, peak_resident_bytes, resident_bytes
from benchmarks.workload import FULL, SNAPKV, Sizes
from snapkv_core import Engine

#: Room for what the first sequences answer while the other prompts are read in small slices.
_MAX_NEW_TOKENS: Final = 2_048
#: Growth below this is noise, and nothing to divide by.
_LEAST_GROWTH_BYTES: Final = 1024 * 1024
_ROOT: Final = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class MemoryFigure:
    """One process that read some prompts and decoded a little.

    Attributes:
        method: `full` or `snapkv`.
        dtype: Number format of weights and KV cache.
        prompt_tokens: Tokens of each prompt.
        batch_size: Distinct prompts held at once.
        loaded_rss_bytes: Resident memory once the model was loaded and warm.
        peak_rss_bytes: Most resident memory from then until the end.
        kv_bytes: Bytes that the KV cache held at the end.
    """

    method: str
    dtype: str
    prompt_tokens: int
    batch_size: int
    loaded_rss_bytes: int
    peak_rss_bytes: int
    kv_bytes: int


def measure_memory(
    model: str, dtype: str, sizes: Sizes, say: Callable[[str], None]
) -> tuple[list[MemoryFigure], list[Ratio]]:
    """Run both methods, each in a process of its own.

    Raises:
        BenchmarkError: A process failed.
    """
    shape = [str(sizes.memory_batch), str(sizes.memory_tokens)]
    figures = []
    for method in ("full", "snapkv"):
        say(f"memory: {sizes.memory_batch} x {sizes.memory_tokens:,} tokens, {method}")
        command = [sys.executable, "-m", "benchmarks.engine_memory", method, model, dtype, *shape]
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BenchmarkError(f"measuring memory failed:\n{done.stderr[-2_000:]}")
        figures.append(MemoryFigure(**json.loads(done.stdout)))
    return figures, memory_ratios(*figures)


def memory_ratios(full: MemoryFigure, kept: MemoryFigure) -> list[Ratio]:
    """Return how much less memory compression takes beside the loaded model.

    What a loaded model itself holds differs from start to start by more than a tenth.
    """
    full_bytes, kept_bytes = (
        max(_LEAST_GROWTH_BYTES, figure.peak_rss_bytes - figure.loaded_rss_bytes)
        for figure in (full, kept)
    )
    size = f"{full.batch_size}x{full.prompt_tokens}"
    name = f"engine/{full.dtype}/RSS growth to its peak, full over snapkv, {size}"
    return [Ratio(name, full_bytes / kept_bytes, "higher")]


def main(arguments: list[str]) -> None:
    """Measure in this process and print the figure."""
    method, model, dtype, batch_size, prompt_tokens = arguments
    config = load_settings({"model": model, "dtype": dtype}).to_engine_config()
    # The slices are those of serving: how much memory reading takes depends on them.
    engine = Engine.load(replace(config, max_num_seqs=int(batch_size)))
    # Loading takes more for a moment than it leaves, and would hide what comes after.
    forget_peak(os.getpid())
    loaded_bytes = resident_bytes(os.getpid())
    with DecodeRun(
        engine,
        {"full": FULL, "snapkv": SNAPKV}[method],
        prompt_tokens=int(prompt_tokens),
        num_requests=int(batch_size),
        max_new_tokens=_MAX_NEW_TOKENS,
    ):
        figure = MemoryFigure(
            method=method,
            dtype=dtype_name(engine),
            prompt_tokens=int(prompt_tokens),
            batch_size=int(batch_size),
            loaded_rss_bytes=loaded_bytes,
            peak_rss_bytes=peak_resident_bytes(os.getpid()),
            kv_bytes=engine.kv_bytes,
        )
    sys.stdout.write(json.dumps(asdict(figure)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
