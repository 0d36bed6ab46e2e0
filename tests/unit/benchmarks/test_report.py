"""Figures become JSON, tables and pictures."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib import image
from rich.console import Console

from benchmarks.baseline import Comparison
from benchmarks.plots import plot_decode, plot_memory, plot_mixed
from benchmarks.report import BenchReport, comparison_table, print_report, write_json
from tests.unit.benchmarks.figures_by_hand import whole_report

UNITS = ("_ms", "_us", "_s", "_bytes", "_tokens", "_per_s")
#: Counts, names and quotients, which have no unit.
PLAIN = frozenset({"batch_size", "count", "num_streams", "num_running", "value", "required"})


def printed(report: BenchReport) -> str:
    """Return what the report prints."""
    console = Console(file=io.StringIO(), width=120)
    print_report(report, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def numbers(value: Any, name: str = "") -> list[str]:
    """Return the names of all numbers in some JSON, those in lists under the list's name."""
    if isinstance(value, dict):
        return [found for key, item in value.items() for found in numbers(item, key)]
    if isinstance(value, list):
        return [found for item in value for found in numbers(item, name)]
    return [name] if isinstance(value, int | float) and not isinstance(value, bool) else []


def test_json_holds_every_figure_with_its_unit(tmp_path: Path) -> None:
    """A number without a unit in its name is a count or a quotient."""
    path = tmp_path / "results.json"
    write_json(whole_report(), path)
    content = json.loads(path.read_text())
    assert len(content["engine"]["decode"]) == 9
    assert content["http"]["mixed"][0]["reading"]["p99_ms"] == 300
    figures = {name for part in ("engine", "http") for name in numbers(content[part])}
    assert {name for name in figures if not name.endswith(UNITS)} <= PLAIN


def test_tables_show_figures_and_broken_promises() -> None:
    """Whoever reads the tables sees what is promised and not kept."""
    text = printed(whole_report())
    assert "at least 2, NOT MET" in text
    assert "at most 1,000 " in text
    assert "at most 2,000, NOT MET" in text
    assert "other server" in text
    assert "250 / 300 / 310" in text


def test_quick_sizes_are_not_judged() -> None:
    """Promises are made for the full sizes."""
    text = printed(whole_report(is_quick=True))
    assert "NOT MET" not in text
    assert "the ratios say nothing" in text


def test_broken_promises_are_ratios_and_times() -> None:
    """None at the tiny sizes, for which nothing is promised."""
    assert whole_report().broken_promises == ["engine/float32/gain", "http/float32/first token"]
    assert whole_report(is_quick=True).broken_promises == []


def test_part_that_was_left_out_has_no_table() -> None:
    """`--only` leaves no empty tables behind."""
    report = whole_report()
    report.http.load, report.http.mixed, report.http.ratios, report.http.limits = [], [], [], []
    text = printed(report)
    assert "HTTP" not in text
    assert "Promised times" not in text


def test_comparison_shows_both_values() -> None:
    """A missing ratio has a dash where its value would be."""
    console = Console(file=io.StringIO(), width=120)
    rows = [Comparison("a", 2.0, 1.0, "worse"), Comparison("b", 3.0, None, "missing")]
    console.print(comparison_table(rows))
    assert isinstance(console.file, io.StringIO)
    cells = [line.split("│")[1:-1] for line in console.file.getvalue().splitlines()]
    assert [[cell.strip() for cell in row] for row in cells if row] == [
        ["a", "2.000", "1.000", "worse"],
        ["b", "3.000", "-", "missing"],
    ]


def test_plots_are_pictures(tmp_path: Path) -> None:
    """One file per kind and number format, each with something drawn on it."""
    report = whole_report()
    paths = plot_decode(report.engine.decode, tmp_path)
    paths.append(plot_mixed(report.http.mixed, tmp_path / "mixed.png"))
    paths.append(plot_memory([(0.0, 1e9), (1.0, 2e9)], tmp_path / "rss.png"))
    assert [path.name for path in paths] == [
        "decode_tokens_per_s_float32.png",
        "decode_step_ms_float32.png",
        "mixed.png",
        "rss.png",
    ]
    for path in paths:
        pixels = image.imread(path)
        assert pixels.shape[1] > 500
        assert pixels.std() > 0.01


def test_no_figures_make_no_plots(tmp_path: Path) -> None:
    """Nothing is drawn of a part that was left out."""
    assert plot_decode([], tmp_path) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("field", ["cpu_model", "torch", "transformers", "cpu_capability", "date"])
def test_machine_is_described(field: str) -> None:
    """A figure without its machine means nothing."""
    assert getattr(whole_report().machine, field)
