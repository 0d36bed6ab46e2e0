"""Figures as JSON and as tables to read."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from benchmarks.attention import AttentionFigure
from benchmarks.baseline import Comparison
from benchmarks.engine_decode import DecodeFigure
from benchmarks.engine_memory import MemoryFigure
from benchmarks.engine_part import EngineFigures
from benchmarks.engine_prefill import PrefillFigure
from benchmarks.figures import Latency, Ratio, TimeLimit
from benchmarks.http_load import LoadFigure
from benchmarks.http_part import HttpFigures
from benchmarks.machine import MachineFacts
from benchmarks.mixed_scenario import MixedFigure

_MIB: Final = 1024 * 1024
#: Columns of words; the others hold numbers.
_TEXTS: Final = (
    "dtype",
    "method",
    "prompts",
    "server",
    "ratio",
    "time",
    "better",
    "promised",
    "verdict",
)


@dataclass(frozen=True, slots=True)
class BenchReport:
    """A whole run.

    Attributes:
        machine: What it ran on.
        model: What was measured.
        is_quick: Whether the sizes were the tiny ones, whose ratios say nothing.
        engine: Figures of the engine part; empty when it was left out.
        http: Figures of the HTTP part; empty when it was left out.
    """

    machine: MachineFacts
    model: str
    is_quick: bool
    engine: EngineFigures
    http: HttpFigures

    @property
    def ratios(self) -> list[Ratio]:
        """The ratios of both parts."""
        return [*self.engine.ratios, *self.http.ratios]

    @property
    def broken_promises(self) -> list[str]:
        """Names of what misses what is promised of it; none at the tiny sizes."""
        if self.is_quick:
            return []
        judged: list[Ratio | TimeLimit] = [*self.ratios, *self.http.limits]
        return [figure.name for figure in judged if not figure.is_met]


def write_json(report: BenchReport, path: Path) -> None:
    """Write every figure; each carries its unit in its name."""
    path.write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")


def print_report(report: BenchReport, console: Console) -> None:
    """Print the tables of what was measured."""
    machine = report.machine
    console.print(
        f"{report.model} on {machine.cpu_model}, {machine.num_cores} cores, "
        f"{machine.cpu_capability}, torch {machine.torch}, transformers {machine.transformers}, "
        f"load average {machine.load_average:.2f} at the start"
    )
    engine, http = report.engine, report.http
    tables = (
        decode_table(engine.decode),
        prefill_table(engine.prefill),
        memory_table(engine.memory),
        attention_table(engine.attention),
        load_table(http.load),
        mixed_table(http.mixed),
        ratio_table(report.ratios, is_judged=not report.is_quick),
        limit_table(http.limits, is_judged=not report.is_quick),
    )
    for table in tables:
        if table.row_count:
            console.print(table)
    if report.is_quick:
        console.print("--quick: the sizes show that everything runs; the ratios say nothing")


def decode_table(figures: Sequence[DecodeFigure]) -> Table:
    """Return a row per batch."""
    return _table(
        "Decode",
        ("dtype", "method", "prompt tokens", "batch", "ms/step", "tokens/s", "KV MiB"),
        (
            (
                row.dtype,
                row.method,
                f"{row.prompt_tokens:,}",
                row.batch_size,
                f"{row.step_ms:.1f}",
                f"{row.tokens_per_s:.1f}",
                f"{row.kv_bytes / _MIB:.1f}",
            )
            for row in figures
        ),
    )


def prefill_table(figures: Sequence[PrefillFigure]) -> Table:
    """Return a row per prompt length."""
    return _table(
        "Reading a prompt",
        ("dtype", "prompt tokens", "engine tokens/s", "transformers tokens/s"),
        (
            (
                row.dtype,
                f"{row.prompt_tokens:,}",
                f"{row.engine_tokens_per_s:.0f}",
                f"{row.transformers_tokens_per_s:.0f}",
            )
            for row in figures
        ),
    )


def memory_table(figures: Sequence[MemoryFigure]) -> Table:
    """Return a row per process."""
    return _table(
        "Memory, a process of its own per row",
        ("dtype", "method", "prompt tokens", "batch", "RSS loaded MiB", "RSS peak MiB", "KV MiB"),
        (
            (
                row.dtype,
                row.method,
                f"{row.prompt_tokens:,}",
                row.batch_size,
                f"{row.loaded_rss_bytes / _MIB:,.0f}",
                f"{row.peak_rss_bytes / _MIB:,.0f}",
                f"{row.kv_bytes / _MIB:,.1f}",
            )
            for row in figures
        ),
    )


def attention_table(figures: Sequence[AttentionFigure]) -> Table:
    """Return a row per number of stored tokens."""
    return _table(
        "Decode attention of one layer",
        ("dtype", "batch", "stored tokens", "stored µs", "dense µs"),
        (
            (
                row.dtype,
                row.batch_size,
                f"{row.stored_tokens:,}",
                f"{row.stored_us:.0f}",
                f"{row.dense_us:.0f}",
            )
            for row in figures
        ),
    )


def load_table(figures: Sequence[LoadFigure]) -> Table:
    """Return a row per load and server, the servers of one load below each other."""
    return _table(
        "HTTP, streams that begin together (ms)",
        ("server", "streams", "prompt tokens", "TTFT p50 / p99", "gap p50 / p99", "tokens/s"),
        (
            (
                row.target,
                row.num_streams,
                f"{row.prompt_tokens:,.0f}",
                _two(row.ttft),
                _two(row.inter_token),
                f"{row.output_tokens_per_s:.1f}",
            )
            for row in figures
        ),
    )


def mixed_table(figures: Sequence[MixedFigure]) -> Table:
    """Return a row per server."""
    return _table(
        "HTTP, a long and then a short prompt beside running streams (ms)",
        (
            "server",
            "streams",
            "long prompt tokens",
            "gap p50 before",
            "gap p50 / p99 / max while read",
            "TTFT short",
            "TTFT long",
        ),
        (
            (
                row.target,
                row.num_running,
                f"{row.long_prompt_tokens:,}",
                f"{row.quiet.p50_ms:.0f}",
                f"{_two(row.reading)} / {row.reading.max_ms:,.0f}",
                f"{row.short_ttft_ms:,.0f}",
                f"{row.long_ttft_ms:,.0f}",
            )
            for row in figures
        ),
    )


def ratio_table(ratios: Sequence[Ratio], *, is_judged: bool = True) -> Table:
    """Return a row per ratio, with what is promised of it unless the sizes are others."""
    return _table(
        "Ratios",
        ("ratio", "value", "better", "promised"),
        (
            (
                ratio.name,
                f"{ratio.value:.3f}",
                ratio.better,
                _promise(ratio) if is_judged else "",
            )
            for ratio in ratios
        ),
    )


def limit_table(limits: Sequence[TimeLimit], *, is_judged: bool = True) -> Table:
    """Return a row per time that has a limit, with that limit unless the sizes are others."""
    return _table(
        "Promised times (ms)",
        ("time", "value", "promised"),
        (
            (
                limit.name,
                f"{limit.value_ms:,.0f}",
                f"at most {limit.at_most_ms:,.0f}{_not_met(limit)}" if is_judged else "",
            )
            for limit in limits
        ),
    )


def comparison_table(comparisons: Sequence[Comparison]) -> Table:
    """Return a row per ratio, beside the baseline's."""
    return _table(
        "Against the baseline",
        ("ratio", "baseline", "now", "verdict"),
        (
            (
                row.name,
                "-" if row.before is None else f"{row.before:.3f}",
                "-" if row.now is None else f"{row.now:.3f}",
                row.verdict,
            )
            for row in comparisons
        ),
    )


def _promise(ratio: Ratio) -> str:
    if ratio.required is None:
        return ""
    bound = "at least" if ratio.better == "higher" else "at most"
    return f"{bound} {ratio.required:g}{_not_met(ratio)}"


def _not_met(figure: Ratio | TimeLimit) -> str:
    return "" if figure.is_met else ", NOT MET"


def _two(latency: Latency) -> str:
    return f"{latency.p50_ms:,.0f} / {latency.p99_ms:,.0f}"


def _table(title: str, headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    table = Table(title=title)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in _TEXTS else "right")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    return table
