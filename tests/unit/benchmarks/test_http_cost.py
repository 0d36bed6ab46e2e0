"""The benchmark of HTTP's own cost runs, and tells figures that are too high."""

import json
from pathlib import Path

import pytest

from benchmarks.http_cost import MAX_REQUEST_MS, MAX_TOKEN_MS, LoadFigure, run
from benchmarks.telemetry_cost import Cost


@pytest.mark.slow
def test_it_measures_every_load(tmp_path: Path) -> None:
    """Few requests measure nothing well, and still more than nothing."""
    assert run(["--requests", "4", "--rounds", "1", "--output", str(tmp_path)]) in (0, 1)
    loads = json.loads((tmp_path / "http_cost.json").read_text())["loads"]
    assert len(loads) == 5
    assert any("chat" in load["name"] and "streamed" in load["name"] for load in loads)
    assert sum(load["cost"]["token_ms"] for load in loads) > 0


@pytest.mark.parametrize(
    ("request_ms", "token_ms", "is_kept"),
    [
        (MAX_REQUEST_MS, MAX_TOKEN_MS, True),
        (MAX_REQUEST_MS + 0.1, 0.1, False),
        (1.0, MAX_TOKEN_MS + 0.1, False),
    ],
)
def test_either_limit_can_be_missed(request_ms: float, token_ms: float, is_kept: bool) -> None:
    assert LoadFigure("x", Cost(request_ms, token_ms)).is_kept is is_kept
