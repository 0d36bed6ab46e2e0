"""Measures what snapshots of prompts spare and cost: `python -m benchmarks.snapshots`."""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from app.settings import SettingsError, load_settings
from benchmarks.errors import BenchmarkError
from benchmarks.machine import machine_facts
from benchmarks.server import serving
from benchmarks.snapshot_fidelity import Fidelity, measure_fidelity
from benchmarks.snapshot_http import (
    HitFigure,
    PhaseFigure,
    measure_hits,
    measure_outage,
    redis_store,
)
from snapkv_core import Engine, SnapKVError

#: What the project promises.
_MIN_MISS_OVER_HIT: Final = 20.0
_MAX_EXACT_OVER_POOL: Final = 1.02
_MAX_INT8_OVER_POOL: Final = 0.52
_NUM_CLIENTS: Final = 4
_OUTAGE_WORDS: Final = 320
_FIDELITY_TOKENS: Final = 2_048
_RESULTS: Final = Path(__file__).with_name("results") / "snapshots"


def run(arguments: Sequence[str]) -> int:
    """Measure and report.

    Returns:
        0; 1 when a promise is broken or a figure could not be taken.
    """
    options = parse(arguments)
    console, errors = Console(), Console(stderr=True)
    options.output.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"machine": asdict(machine_facts())}
    try:
        hits, phases = asyncio.run(_measure_http(options))
        fidelity = _measure_fidelity(options)
    except (BenchmarkError, SnapKVError, SettingsError) as error:
        errors.print(f"error: {error}", markup=False, soft_wrap=True)
        return 1
    results |= {
        "hits": asdict(hits),
        "outage": [asdict(phase) for phase in phases],
        "fidelity": asdict(fidelity),
    }
    path = options.output / "snapshots.json"
    path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    _print(hits, phases, fidelity, console)
    broken = broken_promises(hits, phases, fidelity)
    for promise in broken:
        errors.print(f"broken: {promise}", markup=False, soft_wrap=True)
    console.print(f"written to {path}")
    return 1 if broken else 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the arguments; wrong ones end the process with status 2 and say what is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.snapshots",
        description="Measure what snapshots spare and cost; fail when a promise is broken.",
    )
    parser.add_argument("--words", type=int, default=5_800, help="of a prompt (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="prompts sent twice (%(default)s)")
    parser.add_argument("--phase", type=float, default=30.0, help="seconds of each (%(default)s)")
    parser.add_argument("--prompts", type=int, default=20, help="for 8 bits (%(default)s)")
    parser.add_argument("--model", help="model to measure with (that of the settings)")
    parser.add_argument("--redis-server", default="redis-server", help="program (%(default)s)")
    parser.add_argument(
        "--output", type=Path, default=_RESULTS, help="folder for figures and logs (%(default)s)"
    )
    options = parser.parse_args(arguments)
    if min(options.words, options.rounds, options.phase, options.prompts) < 1:
        parser.error("--words, --rounds, --phase and --prompts must be at least 1")
    return options


async def _measure_http(options: argparse.Namespace) -> tuple[HitFigure, list[PhaseFigure]]:
    model = {} if options.model is None else {"SNAPKV_MODEL": options.model}
    with redis_store(options.redis_server, options.output) as redis:
        settings = {**model, "SNAPKV_SNAPSHOT_VALKEY_URL": redis.url}
        with serving(settings, options.output / "server.log") as server:
            hits = await measure_hits(server.url, num_words=options.words, rounds=options.rounds)
            phases = await measure_outage(
                server.url,
                redis,
                num_clients=_NUM_CLIENTS,
                num_words=_OUTAGE_WORDS,
                phase_s=options.phase,
            )
            return hits, phases


def _measure_fidelity(options: argparse.Namespace) -> Fidelity:
    engine = Engine.load(load_settings({"model": options.model}).to_engine_config())
    return measure_fidelity(engine, options.prompts, _FIDELITY_TOKENS)


def broken_promises(
    hits: HitFigure, phases: Sequence[PhaseFigure], fidelity: Fidelity
) -> list[str]:
    """Return what the project promises and these figures do not keep, a line each."""
    promises = {
        f"a hit's first token comes {_MIN_MISS_OVER_HIT:g} times sooner": (
            hits.miss_over_hit >= _MIN_MISS_OVER_HIT
        ),
        "no request fails, whatever the store does": not any(p.num_failed for p in phases),
        "exact bytes exceed those of the pool by 2 % at most": (
            fidelity.exact_over_pool <= _MAX_EXACT_OVER_POOL
        ),
        "8 bits take half the bytes of 16": fidelity.int8_over_pool <= _MAX_INT8_OVER_POOL,
        "an exact snapshot changes no logit": fidelity.exact_max_difference == 0,
    }
    return [promise for promise, is_kept in promises.items() if not is_kept]


def _print(
    hits: HitFigure, phases: Sequence[PhaseFigure], fidelity: Fidelity, console: Console
) -> None:
    table = Table(title=f"Time to first token, ms, prompts of {hits.prompt_tokens} tokens")
    for heading in ("", *(f"prompt {number}" for number in range(1, len(hits.hit_ttft_s) + 1))):
        table.add_column(heading, justify="right")
    for name, times in (("miss", hits.miss_ttft_s), ("hit", hits.hit_ttft_s)):
        table.add_row(name, *(f"{seconds * 1e3:,.0f}" for seconds in times))
    console.print(table)
    console.print(f"a hit's first token comes {hits.miss_over_hit:.0f} times sooner")
    table = Table(title=f"{_NUM_CLIENTS} clients while the store comes and goes")
    for heading in ("store", "requests", "failed", "TTFT p50, ms", "p99", "snapshots"):
        table.add_column(heading, justify="right")
    for phase in phases:
        uses = ", ".join(f"{use} {num}" for use, num in sorted(phase.snapshots.items()))
        table.add_row(
            phase.store,
            str(phase.num_requests),
            str(phase.num_failed),
            f"{phase.ttft.p50_ms:,.0f}",
            f"{phase.ttft.p99_ms:,.0f}",
            uses,
        )
    console.print(table)
    table = Table(title="Snapshots in bytes, and 8 bits against exact")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in asdict(fidelity).items():
        table.add_row(name, value if isinstance(value, str) else f"{value:.6g}")
    console.print(table)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
