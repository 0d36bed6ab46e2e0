"""Command line of `python -m benchmarks`: what to measure, and where the figures go."""

import argparse
import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from rich.console import Console

from app.settings import SettingsError, load_settings
from benchmarks.baseline import (
    DEFAULT_PATH,
    TOLERANCE,
    compare,
    read_baseline,
    update_baseline,
)
from benchmarks.engine_part import EngineFigures, measure_engine
from benchmarks.engine_prefill import model_source
from benchmarks.errors import BenchmarkError
from benchmarks.http_part import HttpFigures, measure_http
from benchmarks.machine import machine_facts
from benchmarks.plots import plot_decode, plot_mixed
from benchmarks.report import BenchReport, comparison_table, print_report, write_json
from benchmarks.server import serving
from benchmarks.workload import FULL_SIZES, QUICK_SIZES, Sizes
from snapkv_core import EngineConfig, SnapKVError

#: Columns of the tables where no terminal says how many there are.
_FILE_WIDTH: Final = 120
_RESULTS: Final = Path(__file__).with_name("results") / "latest"


def run(arguments: Sequence[str]) -> int:
    """Measure what the arguments ask for.

    Returns:
        0; 1 when a figure could not be taken or, with `--check`, a ratio fell behind the baseline
        or a promise is not kept. Wrong arguments raise `SystemExit` with status 2 and a message.
    """
    options = parse(arguments)
    errors, console = Console(stderr=True), Console()
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    try:
        # Before hours of measuring, not after.
        baseline = read_baseline(options.check) if options.check else None
        report = _measure(options, lambda text: errors.print(f"[dim]{text}[/dim]"))
        _write(report, options.output)
        print_report(report, console)
        console.print(f"written to {options.output}")
        if options.update_baseline:
            update_baseline(options.update_baseline, report.ratios)
            console.print(f"baseline written to {options.update_baseline}")
    except (BenchmarkError, SnapKVError, SettingsError) as error:
        errors.print(f"error: {error}", markup=False, soft_wrap=True)
        return 1
    if baseline is None:
        return 0
    comparisons = compare(baseline, report.ratios)
    console.print(comparison_table(comparisons))
    num_failures = sum(comparison.is_failure for comparison in comparisons)
    if num_failures:
        console.print(
            f"{num_failures} ratios are missing or more than {TOLERANCE:.0%} worse than in "
            f"{options.check}"
        )
    broken = report.broken_promises
    if broken:
        console.print(f"promised and not met: {'; '.join(broken)}")
    return 1 if num_failures or broken else 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the arguments; wrong ones end the process with status 2 and say what is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure the engine and the HTTP server; do nothing else meanwhile.",
    )
    parser.add_argument("--model", help="model to measure (that of the settings)")
    parser.add_argument(
        "--dtype",
        action="append",
        choices=("float32", "bfloat16", "auto"),
        help="number format; may be given more than once (that of the settings)",
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does everything run?")
    parser.add_argument(
        "--ratios-only", action="store_true", help="leave out the tables that enter no ratio"
    )
    parser.add_argument("--only", choices=("engine", "http"), help="leave the other part out")
    parser.add_argument(
        "--output", type=Path, default=_RESULTS, help="folder for figures and plots (%(default)s)"
    )
    parser.add_argument("--url", type=_url, help="a running server, instead of starting one")
    parser.add_argument(
        "--knobs",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="send compression fields to the server that is measured",
    )
    parser.add_argument(
        "--compare", type=_url, metavar="URL", help="another OpenAI-compatible server to load too"
    )
    reference = parser.add_mutually_exclusive_group()
    for name, text in (
        ("--check", "fail when a ratio is worse than in this baseline or a promise is not met"),
        ("--update-baseline", "write the ratios to this baseline"),
    ):
        reference.add_argument(
            name,
            type=Path,
            nargs="?",
            const=DEFAULT_PATH,
            metavar="BASELINE.json",
            help=f"{text} (benchmarks/baseline.json)",
        )
    options = parser.parse_args(arguments)
    if options.only == "engine" and (options.url or options.compare):
        parser.error("--url and --compare belong to the HTTP part, which --only engine leaves out")
    if options.only == "http" and options.url and options.dtype:
        parser.error("--dtype: the server behind --url has a number format already")
    if options.quick and (options.check or options.update_baseline):
        parser.error("--quick measures other sizes than a baseline holds")
    if options.check and not options.check.is_file():
        parser.error(f"--check: there is no file {options.check}")
    return options


def _url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise argparse.ArgumentTypeError(f"{text!r} is no URL such as http://127.0.0.1:8000")
    return text.rstrip("/")


def _measure(options: argparse.Namespace, say: Callable[[str], None]) -> BenchReport:
    sizes = QUICK_SIZES if options.quick else FULL_SIZES
    if options.ratios_only:
        sizes = replace(sizes, batch_sizes=(), http_streams=())
    configs = [
        load_settings({"model": options.model, "dtype": dtype}).to_engine_config()
        for dtype in options.dtype or (None,)
    ]
    report = BenchReport(
        machine=machine_facts(),
        model=configs[0].model,
        is_quick=options.quick,
        engine=EngineFigures(),
        http=HttpFigures(),
    )
    # A run of an hour shall not end for want of a folder.
    options.output.mkdir(parents=True, exist_ok=True)
    if options.only != "http":
        for config in configs:
            report.engine.add(measure_engine(config, sizes, say))
    if options.only != "engine":
        for config in configs[:1] if options.url else configs:
            report.http.add(_measure_http(options, config, sizes, say))
    return report


def _measure_http(
    options: argparse.Namespace, config: EngineConfig, sizes: Sizes, say: Callable[[str], None]
) -> HttpFigures:
    """Measure the given server, or one that is started for it in `config`'s number format."""

    def load(url: str, count_tokens: Callable[[str], int] | None) -> HttpFigures:
        return asyncio.run(
            measure_http(
                url,
                sizes,
                say,
                knobs=options.knobs,
                compare_url=options.compare,
                count_tokens=count_tokens,
            )
        )

    if options.url:
        return load(options.url, None)
    settings = {"SNAPKV_MODEL": config.model, "SNAPKV_DTYPE": config.dtype}
    say(f"starting a server with {config.model} ({config.dtype})")
    with serving(settings, options.output / "server.log") as server:
        # Words are as fair to one tokenizer as to another.
        return load(server.url, None if options.compare else _token_counter(config))


def _token_counter(config: EngineConfig) -> Callable[[str], int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_source(config), revision=config.revision)
    return lambda text: len(tokenizer(text)["input_ids"])


def _write(report: BenchReport, folder: Path) -> None:
    write_json(report, folder / "results.json")
    plot_decode(report.engine.decode, folder)
    if report.http.mixed:
        plot_mixed(report.http.mixed, folder / "mixed_gaps.png")
