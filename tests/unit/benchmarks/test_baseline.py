"""The check against a baseline: what fails it and what does not."""

import json
from pathlib import Path

import pytest

from benchmarks.baseline import compare, read_baseline, update_baseline
from benchmarks.errors import BenchmarkError
from benchmarks.figures import Ratio

GAIN = Ratio("engine/float32/gain", 2.0, "higher", required=3.0)
COST = Ratio("engine/float32/cost", 1.0, "lower")
BASELINE = {ratio.name: ratio for ratio in (GAIN, COST)}


def verdicts(*now: Ratio) -> dict[str, str]:
    """Compare with the baseline; verdict by the last part of the name."""
    return {row.name.rpartition("/")[2]: row.verdict for row in compare(BASELINE, now)}


def ratio(name: str, value: float, better: str = "higher") -> Ratio:
    """Return a ratio in the scope of the baseline."""
    return Ratio(f"engine/float32/{name}", value, better)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gain", "cost", "expected"),
    [
        (2.0, 1.0, ("same", "same")),
        (1.82, 1.1, ("same", "same")),
        (1.78, 1.12, ("worse", "worse")),
        (2.4, 0.8, ("better", "better")),
    ],
)
def test_worse_depends_on_which_way_is_better(
    gain: float, cost: float, expected: tuple[str, str]
) -> None:
    """Beyond a tenth a ratio is a regression; an improvement never is."""
    found = verdicts(ratio("gain", gain), ratio("cost", cost, "lower"))
    assert (found["gain"], found["cost"]) == expected


def test_failures_are_what_is_worse_or_missing() -> None:
    """A ratio that is no longer measured cannot pass unseen; a new one is no fault."""
    rows = compare(BASELINE, [ratio("gain", 1.0), ratio("more", 5.0)])
    assert {row.name.rpartition("/")[2]: row.is_failure for row in rows} == {
        "cost": True,
        "gain": True,
        "more": False,
    }
    assert verdicts(ratio("gain", 2.0), ratio("more", 5.0))["cost"] == "missing"


def test_parts_that_were_not_measured_are_not_missed() -> None:
    """`--only http` and another number format say nothing about this baseline."""
    assert [row.verdict for row in compare(BASELINE, [Ratio("http/float32/x", 1, "lower")])] == [
        "new"
    ]
    assert {row.verdict for row in compare(BASELINE, [Ratio("engine/bfloat16/x", 1, "lower")])} == {
        "new"
    }


def test_update_replaces_what_was_measured_and_keeps_the_rest(tmp_path: Path) -> None:
    """A run of one part leaves the other part's ratios alone and drops its own old ones."""
    path = tmp_path / "baseline.json"
    update_baseline(path, [GAIN, COST])
    update_baseline(path, [Ratio("http/float32/pace", 3.0, "higher")])
    update_baseline(path, [ratio("gain", 2.5)])
    read = read_baseline(path)
    assert {name: entry.value for name, entry in read.items()} == {
        "engine/float32/gain": 2.5,
        "http/float32/pace": 3.0,
    }
    assert set(json.loads(path.read_text())["ratios"]["engine/float32/gain"]) == {"value", "better"}


@pytest.mark.parametrize(
    "text",
    [
        "no json",
        "[]",
        "{}",
        '{"format": 2, "ratios": {}}',
        '{"format": 1, "ratios": []}',
        '{"format": 1, "ratios": {"a": {"value": "2", "better": "higher"}}}',
        '{"format": 1, "ratios": {"a": {"value": 0, "better": "higher"}}}',
        '{"format": 1, "ratios": {"a": {"value": 1, "better": "more"}}}',
    ],
)
def test_what_is_no_baseline_is_refused(tmp_path: Path, text: str) -> None:
    """The message names the file."""
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(BenchmarkError, match=r"broken\.json"):
        read_baseline(path)
