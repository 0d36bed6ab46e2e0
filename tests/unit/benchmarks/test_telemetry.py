"""What telemetry costs: the arithmetic, and when the run fails."""

import json
from pathlib import Path

import pytest

from benchmarks import telemetry
from benchmarks.telemetry_cost import NUM_STREAMS, Cost, TelemetryFigure, cost_of

FIGURE = TelemetryFigure(
    on=Cost(request_ms=10.0, token_ms=0.25),
    off=Cost(request_ms=3.6, token_ms=0.15),
    step_ms=200.0,
    answer_tokens=64,
)


def test_costs_of_a_request_and_of_a_token_follow_from_two_lengths() -> None:
    """5 ms and 0.25 ms a token: 9 ms with 16 tokens, 69 ms with 256."""
    cost = cost_of(9.0, 69.0, 16, 256)
    assert cost.request_ms == pytest.approx(5.0)
    assert cost.token_ms == pytest.approx(0.25)


def test_a_step_pays_for_its_tokens_and_its_part_of_the_requests() -> None:
    """Eight streams: 8 x 0.1 ms for tokens, 8 x 6.4 / 64 ms for requests, of 200 ms."""
    assert NUM_STREAMS == 8
    assert FIGURE.added_per_step_ms == pytest.approx(1.6)
    assert FIGURE.share_of_step == pytest.approx(0.008)


@pytest.mark.parametrize(("step_ms", "status"), [(81.0, 0), (79.0, 1)])
def test_run_fails_above_two_percent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, step_ms: float, status: int
) -> None:
    """1.6 ms of 81 ms are below, of 79 ms above."""
    monkeypatch.setattr(telemetry, "measure_costs", lambda *_: (FIGURE.on, FIGURE.off))
    monkeypatch.setattr(telemetry, "measure_step_ms", lambda _config: step_ms)
    assert telemetry.run(["--output", str(tmp_path)]) == status
    results = json.loads((tmp_path / "telemetry.json").read_text(encoding="utf-8"))
    assert results["share_of_step"] == pytest.approx(1.6 / step_ms)
    assert results["machine"]["num_cores"] > 0


@pytest.mark.parametrize("arguments", [["--requests", "0"], ["--rounds", "0"], ["--rounds", "x"]])
def test_wrong_arguments_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        telemetry.parse(arguments)
    assert ended.value.code == 2
    assert arguments[0] in capsys.readouterr().err
