"""A minute of mixed load on the real server: right answers, nothing left over, no gross leak."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.markdown import ROOT
from tests.support.served import example_environment

pytestmark = [pytest.mark.slow, pytest.mark.demo, pytest.mark.timeout(900)]


def test_a_minute_of_mixed_load_leaves_nothing_behind(tmp_path: Path) -> None:
    """Clients that come, wait, leave and are cut off get right answers or a proper refusal."""
    # Half a minute is too short to tell a small leak from warm-up; `make soak` looks closer.
    arguments = ["--seconds", "60", "--max-growth", "20", "--output", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.soak", *arguments],
        cwd=ROOT,
        env=example_environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "soak.json").read_text(encoding="utf-8"))
    outcomes = report["counts"]["outcomes"]
    assert outcomes["finished"] > 0
    assert outcomes["left"] > 0
    assert set(report["counts"]["statuses"]) <= {"200", "429", "503"}
    assert len(report["rss_samples"]) > 60
    assert (tmp_path / "soak_rss.png").stat().st_size > 10_000
