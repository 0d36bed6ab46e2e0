"""The command lines: wrong use is said at once, and what a run does with its ratios."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cli, soak
from benchmarks.baseline import read_baseline, update_baseline
from benchmarks.engine_part import EngineFigures
from benchmarks.errors import BenchmarkError
from benchmarks.figures import Ratio
from tests.unit.benchmarks.figures_by_hand import whole_report


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine part find the figures made up by hand."""
    monkeypatch.setattr(cli, "measure_engine", lambda *_: whole_report().engine)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--dtype", "int8"], "--dtype"),
        (["--only", "gpu"], "--only"),
        (["--url", "nonsense"], "'nonsense' is no URL"),
        (["--compare", "ftp://x"], "'ftp://x' is no URL"),
        (["--only", "engine", "--url", "http://x"], "--only engine"),
        (["--only", "engine", "--compare", "http://x"], "--only engine"),
        (["--only", "http", "--url", "http://x", "--dtype", "float32"], "number format already"),
        (["--check", "missing.json"], "no file missing.json"),
        (["--check", "a", "--update-baseline", "b"], "not allowed with"),
        (["--quick", "--update-baseline"], "--quick"),
        (["--unknown"], "--unknown"),
    ],
)
def test_wrong_use_of_bench_exits_2(
    arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a message, before anything is loaded."""
    assert_refused(cli.run, arguments, part, capsys)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--seconds", "0"], "--seconds"),
        (["--clients", "none"], "--clients"),
        (["--pid", "1"], "--pid"),
        (["--url", "nonsense"], "'nonsense' is no URL"),
    ],
)
def test_wrong_use_of_soak_exits_2(
    arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a message, before a server is started."""
    assert_refused(soak.run, arguments, part, capsys)


def assert_refused(
    run: Callable[[list[str]], int],
    arguments: list[str],
    part: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Run, and find the reason on standard error."""
    with pytest.raises(SystemExit) as ended:
        run(arguments)
    assert ended.value.code == 2
    assert part in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.usefixtures("measured")
def test_run_writes_figures_plots_and_baseline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Everything lands in the folder, which is made when it is missing."""
    folder, baseline = tmp_path / "new" / "folder", tmp_path / "baseline.json"
    arguments = ["--only", "engine", "--output", str(folder), "--update-baseline", str(baseline)]
    assert cli.run(arguments) == 0
    assert json.loads((folder / "results.json").read_text())["engine"]["decode"]
    assert len(list(folder.glob("*.png"))) == 2
    assert read_baseline(baseline)["engine/float32/gain"].value == 1.5
    assert "at least 2, NOT MET" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("before", "required", "status", "told"),
    [
        (1.5, None, 0, "same"),
        (1.0, 1.5, 0, "better"),
        (3.0, None, 1, "worse"),
        (1.5, 2.0, 1, "promised and not met: engine/float32/gain"),
    ],
)
def test_check_fails_on_a_regression_or_a_broken_promise_only(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    before: float,
    required: float | None,
    status: int,
    told: str,
) -> None:
    """The exit status is what a script reads, the table what a person does."""
    engine = whole_report().engine
    engine.ratios = [replace(ratio, required=required) for ratio in engine.ratios]
    monkeypatch.setattr(cli, "measure_engine", lambda *_: engine)
    baseline = tmp_path / "baseline.json"
    update_baseline(baseline, [Ratio("engine/float32/gain", before, "higher")])
    arguments = ["--only", "engine", "--output", str(tmp_path), "--check", str(baseline)]
    assert cli.run(arguments) == status
    assert told in capsys.readouterr().out


def test_number_formats_are_measured_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each gets an engine of its own, and all figures end in one file."""
    seen: list[str] = []

    def measure(config: Any, *_: object) -> EngineFigures:
        seen.append(config.dtype)
        return whole_report().engine

    monkeypatch.setattr(cli, "measure_engine", measure)
    arguments = ["--only", "engine", "--dtype", "float32", "--dtype", "bfloat16"]
    assert cli.run([*arguments, "--output", str(tmp_path)]) == 0
    assert seen == ["float32", "bfloat16"]
    content = json.loads((tmp_path / "results.json").read_text())
    assert len(content["engine"]["prefill"]) == 2


def test_figure_that_cannot_be_taken_is_one_line_and_exit_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No traceback for a server that is not there or a cache that is too small."""

    def fail(*_: object) -> EngineFigures:
        raise BenchmarkError("the KV cache is too small")

    monkeypatch.setattr(cli, "measure_engine", fail)
    assert cli.run(["--only", "engine", "--output", str(tmp_path)]) == 1
    assert capsys.readouterr().err.strip() == "error: the KV cache is too small"


def test_broken_baseline_is_found_before_measuring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not after an hour."""
    baseline = tmp_path / "baseline.json"
    baseline.write_text("{}")
    assert cli.run(["--check", str(baseline), "--output", str(tmp_path)]) == 1
    assert "is no baseline" in capsys.readouterr().err
