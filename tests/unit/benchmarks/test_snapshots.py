"""What snapshots spare and cost: which promises are held against the figures, and the figures."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from benchmarks import snapshots
from benchmarks.errors import BenchmarkError
from benchmarks.figures import Latency
from benchmarks.snapshot_fidelity import Fidelity, measure_fidelity
from benchmarks.snapshot_http import HitFigure, PhaseFigure
from tests.support.engines import make_engine
from tests.support.models import build_model

HITS = HitFigure(5_800, [20.0], [0.5], 40.0)
PHASE = PhaseFigure("down", 30.0, 20, 0, Latency.of_seconds([0.1]), {"miss": 20})
FIDELITY = Fidelity("bfloat16", 20, 2_048, 64, 1.01, 0.51, 0.0, 3e-4, 2e-3, 4e-4, 0.99, 0.97)


def test_kept_promises_are_not_named() -> None:
    assert snapshots.broken_promises(HITS, [PHASE], FIDELITY) == []


@pytest.mark.parametrize(
    ("hits", "phases", "fidelity", "named"),
    [
        (replace(HITS, miss_over_hit=19.9), [PHASE], FIDELITY, "20 times sooner"),
        (HITS, [PHASE, replace(PHASE, num_failed=1)], FIDELITY, "no request fails"),
        (HITS, [PHASE], replace(FIDELITY, exact_over_pool=1.03), "2 % at most"),
        (HITS, [PHASE], replace(FIDELITY, int8_over_pool=0.6), "half the bytes"),
        (HITS, [PHASE], replace(FIDELITY, exact_max_difference=1e-9), "no logit"),
    ],
)
def test_broken_ones_are(
    hits: HitFigure, phases: Sequence[PhaseFigure], fidelity: Fidelity, named: str
) -> None:
    (broken,) = snapshots.broken_promises(hits, phases, fidelity)
    assert named in broken


def test_exact_snapshots_change_nothing_and_8_bits_little() -> None:
    engine = make_engine(build_model("llama", 2, seed=21))
    found = measure_fidelity(engine, 2, 100)
    assert found.exact_max_difference == 0.0
    assert 0.0 < found.kl_mean <= found.kl_worst_prompt < 0.01
    assert 0.9 < found.top1_worst_prompt <= found.top1 <= 1.0
    assert found.int8_over_pool < found.exact_over_pool
    engine.check_integrity()
    assert engine.kv_bytes == 0


def test_prompts_longer_than_the_texts_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.snapshot_fidelity._TEXTS", ())
    with pytest.raises(BenchmarkError, match="0 tokens"):
        measure_fidelity(make_engine(build_model("llama", 2, seed=21)), 1, 100)


def test_redis_that_is_not_there_is_one_line(
    tmp_path: object, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--redis-server", "/nowhere/redis-server", "--output", str(tmp_path)]
    assert snapshots.run(arguments) == 1
    assert "cannot be run" in capsys.readouterr().err


@pytest.mark.parametrize("argument", ["--words", "--rounds", "--phase", "--prompts"])
def test_wrong_arguments_are_refused(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        snapshots.parse([argument, "0"])
    assert ended.value.code == 2
    assert argument in capsys.readouterr().err
