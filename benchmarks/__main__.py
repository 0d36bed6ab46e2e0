"""Measure prefill and decode of one sequence, full and compressed, and print a table.

Run as `python -m benchmarks [--output FILE]`; do nothing else on the machine meanwhile.
"""

import argparse
import json
import platform
import resource
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch
from rich.console import Console
from rich.table import Table

from snapkv_core import (
    CompressionConfig,
    Engine,
    EngineConfig,
    GenerationRequest,
    RequestSummary,
    SamplingParams,
)

_PROMPT_LENGTHS: Final = (1024, 3072, 6144)
_NEW_TOKENS: Final = 32
_FULL: Final = CompressionConfig(method="full")
_COMPRESSED: Final = CompressionConfig(
    max_capacity_prompt=512, window_size=16, kernel_size=15, pooling="max"
)


@dataclass(frozen=True, slots=True)
class Measurement:
    """One prompt length under both methods.

    Attributes:
        prompt_tokens: Tokens read.
        prefill_tokens_per_s: Tokens read per second, compressed run.
        full_decode_ms: Milliseconds per generated token with the full cache.
        compressed_decode_ms: The same with the compressed one.
        full_bytes: KV bytes of the prompt before compression.
        compressed_bytes: KV bytes after.
        kept_attention_mass: Share of the window's attention that was kept.
    """

    prompt_tokens: int
    prefill_tokens_per_s: float
    full_decode_ms: float
    compressed_decode_ms: float
    full_bytes: int
    compressed_bytes: int
    kept_attention_mass: float


def measure(engine: Engine, num_tokens: int) -> Measurement:
    """Run one prompt twice, full first, and compare."""
    # Real token ids in no real order: what they say changes neither time nor memory.
    prompt = tuple(100 + index * 7919 % 40_000 for index in range(num_tokens))
    full = _run(engine, prompt, _FULL)
    compressed = _run(engine, prompt, _COMPRESSED)
    report = compressed.compression
    assert report is not None, "a finished request has a report"
    return Measurement(
        prompt_tokens=num_tokens,
        prefill_tokens_per_s=num_tokens / compressed.timings.prefill_ms * 1e3,
        full_decode_ms=full.timings.decode_ms / (_NEW_TOKENS - 1),
        compressed_decode_ms=compressed.timings.decode_ms / (_NEW_TOKENS - 1),
        full_bytes=report.original_bytes,
        compressed_bytes=report.compressed_bytes,
        kept_attention_mass=report.kept_attention_mass,
    )


def _run(engine: Engine, prompt: tuple[int, ...], compression: CompressionConfig) -> RequestSummary:
    sampling = SamplingParams(max_new_tokens=_NEW_TOKENS, ignore_eos=True)
    return engine.generate(GenerationRequest("bench", prompt, sampling, compression)).summary


def _table(measurements: list[Measurement]) -> Table:
    table = Table(title=f"capacity {_COMPRESSED.max_capacity_prompt}, one sequence")
    for heading in (
        "prompt tokens",
        "prefill tok/s",
        "decode ms full",
        "decode ms kept",
        "full / kept",
        "KV ratio",
    ):
        table.add_column(heading, justify="right")
    for row in measurements:
        table.add_row(
            f"{row.prompt_tokens:,}",
            f"{row.prefill_tokens_per_s:.0f}",
            f"{row.full_decode_ms:.1f}",
            f"{row.compressed_decode_ms:.1f}",
            f"{row.full_decode_ms / row.compressed_decode_ms:.2f}",
            f"{row.full_bytes / row.compressed_bytes:.1f}",
        )
    return table


def main() -> int:
    """Measure, print a table, and write JSON when asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    arguments = parser.parse_args()
    engine = Engine.load(EngineConfig(model=arguments.model))
    measurements = [measure(engine, num_tokens) for num_tokens in _PROMPT_LENGTHS]
    Console().print(_table(measurements))
    if arguments.output is not None:
        result = {
            "machine": platform.machine(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "num_threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "device": str(engine.device),
            "dtype": str(engine.dtype),
            "max_rss_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            "measurements": [asdict(row) for row in measurements],
        }
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
