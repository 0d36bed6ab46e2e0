"""Percentiles, gaps, slopes and ratios, against values worked out by hand."""

import pytest

from benchmarks.figures import (
    Latency,
    Ratio,
    change_between_quarters_percent,
    gaps_s,
    percentile,
    slope_percent_per_minute,
)


@pytest.mark.parametrize(
    ("percent", "expected"), [(0, 1.0), (25, 1.75), (50, 2.5), (99, 3.97), (100, 4.0)]
)
def test_percentile_lies_between_its_neighbours(percent: float, expected: float) -> None:
    """The order of the values does not matter, and the result is linear between two of them."""
    assert percentile([3.0, 1.0, 4.0, 2.0], percent) == pytest.approx(expected)


def test_percentile_of_one_value_is_that_value() -> None:
    """A single stream has a p99 as well."""
    assert percentile([7.0], 99) == 7.0


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], -1), ([1.0], 101)])
def test_percentile_refuses_what_has_none(values: list[float], percent: float) -> None:
    """No figure is made up."""
    with pytest.raises(ValueError, match="percentile"):
        percentile(values, percent)


def test_latency_is_in_milliseconds() -> None:
    """Seconds go in."""
    latency = Latency.of_seconds([0.001, 0.002, 0.003])
    assert latency.count == 3
    assert latency.p50_ms == pytest.approx(2.0)
    assert latency.p99_ms == pytest.approx(2.98)
    assert latency.max_ms == pytest.approx(3.0)


def test_gaps_count_when_they_reach_into_the_window() -> None:
    """A stall that begins before the window or ends after it belongs to it."""
    times_s = [0.0, 1.0, 3.0, 6.0, 10.0]
    assert gaps_s(times_s) == [1, 2, 3, 4]
    assert gaps_s(times_s, 2.0, 5.0) == [2, 3]
    assert gaps_s(times_s, 3.0, 6.0) == [3]
    assert gaps_s([1.0]) == []


def test_slope_of_a_line_is_its_growth_a_minute() -> None:
    """From 90 to 110 in a minute is 20 % of the mean."""
    samples = [(float(at_s), 90 + at_s / 3) for at_s in range(61)]
    assert slope_percent_per_minute(samples) == pytest.approx(20.0)


def test_slope_sees_through_noise_and_is_zero_without_growth() -> None:
    """What goes up and down stays where it is."""
    samples = [(float(at_s), 100 + (-1) ** at_s) for at_s in range(101)]
    assert slope_percent_per_minute(samples) == pytest.approx(0.0, abs=0.1)
    assert slope_percent_per_minute([(0.0, 5.0)]) == 0.0
    assert slope_percent_per_minute([(1.0, 5.0), (1.0, 9.0)]) == 0.0


def test_quarters_are_compared_by_their_means() -> None:
    """The middle half does not count."""
    sizes = [100, 100, 500, 900, 1, 1, 110, 130]
    samples = [(float(at_s), float(size)) for at_s, size in enumerate(sizes)]
    assert change_between_quarters_percent(samples) == pytest.approx(20.0)
    assert change_between_quarters_percent(samples[:3]) == 0.0


@pytest.mark.parametrize(
    ("value", "better", "required", "is_met"),
    [
        (2.0, "higher", 2.0, True),
        (1.9, "higher", 2.0, False),
        (1.1, "lower", 1.1, True),
        (1.2, "lower", 1.1, False),
        (0.1, "higher", None, True),
    ],
)
def test_promise_is_a_floor_or_a_ceiling(
    value: float, better: str, required: float | None, is_met: bool
) -> None:
    """Which one depends on what is better."""
    assert Ratio("name", value, better, required).is_met is is_met  # type: ignore[arg-type]
