"""Which figures are divided by which, and what is promised of the quotient."""

from dataclasses import replace

import pytest

from benchmarks.attention import AttentionFigure, attention_ratio
from benchmarks.engine_memory import MemoryFigure, memory_ratios
from benchmarks.engine_prefill import PrefillFigure, prefill_ratio
from benchmarks.headline import headline_ratios
from benchmarks.http_part import OTHER, OURS, http_ratios, mixed_limits
from tests.unit.benchmarks.figures_by_hand import decode_figure, load_figure, mixed_figure_of


def test_headline_divides_steps_and_bytes() -> None:
    """Full over compressed is the gain, long over short shows how flat a step is."""
    gain, flatness, memory = headline_ratios(
        decode_figure("full", 6_000, 8, 240.0),
        decode_figure("snapkv", 6_000, 8, 100.0),
        decode_figure("snapkv", 1_000, 8, 80.0),
    )
    assert (gain.value, gain.better, gain.required) == (2.4, "higher", 2.0)
    assert (flatness.value, flatness.better, flatness.is_met) == (1.25, "lower", False)
    assert memory.value == 1.0
    assert gain.name == "engine/float32/decode step, full over snapkv, 8x6000"


def test_prefill_and_attention_and_memory() -> None:
    """Pace is better when higher, cost when lower."""
    pace = prefill_ratio(PrefillFigure("bfloat16", 3_000, 10.0, 9.0, 90.0, 100.0))
    assert (pace.value, pace.is_met) == (0.9, False)
    cost = attention_ratio(AttentionFigure("float32", 8, 576, 300.0, 200.0))
    assert (cost.value, cost.better) == (1.5, "lower")
    mib = 1024 * 1024
    full, kept, flat = (
        MemoryFigure(method, "float32", 3_000, 8, loaded * mib, peak * mib, 1)
        for method, loaded, peak in (
            ("full", 500, 800),
            ("snapkv", 900, 1_000),
            ("snapkv", 500, 500),
        )
    )
    assert [ratio.value for ratio in memory_ratios(full, kept)] == [3.0]
    assert [ratio.value for ratio in memory_ratios(full, flat)] == [300.0]


def test_http_ratios_are_of_our_server_alone() -> None:
    """Another server's figures belong into no baseline."""
    load = [load_figure(OURS, 1, 10.0), load_figure(OURS, 8, 45.0), load_figure(OTHER, 8, 900.0)]
    ratios = http_ratios("float32", load, [mixed_figure_of(OTHER), mixed_figure_of(OURS)])
    assert [ratio.value for ratio in ratios] == [4.5, 5.0, 0.25]
    assert [ratio.better for ratio in ratios] == ["higher", "lower", "lower"]
    assert {ratio.name.rpartition("/")[0] for ratio in ratios} == {"http/float32"}


@pytest.mark.parametrize(
    ("gap_ms", "first_token_ms", "met"),
    [
        (999.0, 2_000.0, (True, True)),
        (1_001.0, 1_999.0, (False, True)),
        (1.0, 2_001.0, (True, False)),
    ],
)
def test_waiting_while_a_long_prompt_is_read_has_limits(
    gap_ms: float, first_token_ms: float, met: tuple[bool, bool]
) -> None:
    """For callers of our server; another's is not ours to promise."""
    figure = mixed_figure_of(OURS)
    figure = replace(
        figure,
        reading=replace(figure.reading, p99_ms=gap_ms),
        short_ttft_ms=first_token_ms,
    )
    gap, first_token = mixed_limits("float32", [mixed_figure_of(OTHER), figure])
    assert (gap.value_ms, first_token.value_ms) == (gap_ms, first_token_ms)
    assert (gap.is_met, first_token.is_met) == met


@pytest.mark.parametrize(("dtype", "is_met"), [("float32", True), ("bfloat16", False)])
def test_bfloat16_promises_more(dtype: str, is_met: bool) -> None:
    """Half the bytes of weights leave more of a step to the KV cache."""
    full, kept = (
        replace(decode_figure(method, 6_000, 8, step_ms), dtype=dtype)
        for method, step_ms in (("full", 250.0), ("snapkv", 100.0))
    )
    gain, *_ = headline_ratios(full, kept, kept)
    assert gain.value == pytest.approx(2.5)
    assert gain.is_met is is_met
