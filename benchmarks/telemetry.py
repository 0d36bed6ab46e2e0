"""Measures what all telemetry costs against a decode step: `python -m benchmarks.telemetry`."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Final

from rich.console import Console
from rich.table import Table

from app.settings import SettingsError, load_settings
from benchmarks.errors import BenchmarkError
from benchmarks.machine import machine_facts
from benchmarks.telemetry_cost import NUM_STREAMS, TelemetryFigure, measure_costs
from snapkv_core import EngineConfig, SnapKVError

#: What the project promises at most of a decode step.
_LIMIT: Final = 0.02
_ANSWER_TOKENS: Final = 64
_PROMPT_TOKENS: Final = 1_024
_NUM_STEPS: Final = 40
_RESULTS: Final = Path(__file__).with_name("results") / "telemetry"


def run(arguments: Sequence[str]) -> int:
    """Measure and report.

    Returns:
        0; 1 when telemetry costs more than it may, or a figure could not be taken.
    """
    options = parse(arguments)
    console, errors = Console(), Console(stderr=True)
    options.output.mkdir(parents=True, exist_ok=True)
    machine = machine_facts()
    try:
        config = load_settings({"model": options.model}).to_engine_config()
        on, off = measure_costs(
            options.requests, options.rounds, options.output, lambda text: errors.print(text)
        )
        figure = TelemetryFigure(on, off, measure_step_ms(config), _ANSWER_TOKENS)
    except (BenchmarkError, SnapKVError, SettingsError) as error:
        errors.print(f"error: {error}", markup=False, soft_wrap=True)
        return 1
    results = {
        "machine": asdict(machine),
        **asdict(figure),
        "added_per_step_ms": figure.added_per_step_ms,
        "share_of_step": figure.share_of_step,
    }
    path = options.output / "telemetry.json"
    path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    _print(figure, console)
    console.print(f"written to {path}")
    return 1 if figure.share_of_step > _LIMIT else 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the arguments; wrong ones end the process with status 2 and say what is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.telemetry",
        description="Measure what telemetry costs; fail when it is over "
        f"{_LIMIT:.0%} of a decode step.",
    )
    parser.add_argument("--requests", type=int, default=200, help="of a turn (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side (%(default)s)")
    parser.add_argument("--model", help="model whose decode step is timed (that of the settings)")
    parser.add_argument(
        "--output", type=Path, default=_RESULTS, help="folder for figures and logs (%(default)s)"
    )
    options = parser.parse_args(arguments)
    if options.requests < 1 or options.rounds < 1:
        parser.error("--requests and --rounds must be at least 1")
    return options


def measure_step_ms(config: EngineConfig) -> float:
    """Return the median decode step of the real engine with as many compressed sequences.

    Raises:
        ModelLoadError: The model cannot be loaded.
        BenchmarkError: The sequences did not get as far as decoding.
    """
    from benchmarks.engine_decode import DecodeRun, decode_config
    from benchmarks.workload import SNAPKV
    from snapkv_core import Engine

    engine = Engine.load(decode_config(config, NUM_STREAMS))
    with DecodeRun(
        engine, SNAPKV, prompt_tokens=_PROMPT_TOKENS, num_choices=NUM_STREAMS
    ) as decoding:
        return median(decoding.time_steps(_NUM_STEPS)) * 1e3


def _print(figure: TelemetryFigure, console: Console) -> None:
    table = Table(title="Processor time of the server, ms")
    for heading in ("telemetry", "per request", "per token"):
        table.add_column(heading, justify="left" if heading == "telemetry" else "right")
    for name, cost in (("on", figure.on), ("off", figure.off)):
        table.add_row(name, f"{cost.request_ms:.2f}", f"{cost.token_ms:.3f}")
    console.print(table)
    console.print(
        f"telemetry adds {figure.added_per_step_ms:.2f} ms to a step of {NUM_STREAMS} streams with "
        f"answers of {figure.answer_tokens} tokens: {figure.share_of_step:.2%} of the engine's "
        f"{figure.step_ms:.0f} ms (promised: at most {_LIMIT:.0%})",
        soft_wrap=True,
    )


if __name__ == "__main__":
    # Before PyTorch is imported, as in `benchmarks.__main__`.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # noqa: TID251  # before any settings
    sys.exit(run(sys.argv[1:]))
