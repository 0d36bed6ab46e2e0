"""What a refused caller is told to wait is how often requests have ended while the engine ran."""

import pytest

from snapkv_core.engine.service_rate import ServiceRate


def rate_after(*intervals_s: float) -> ServiceRate:
    """Let requests end one after the other, so many seconds apart."""
    rate, now_s = ServiceRate(), 100.0
    rate.note_busy(now_s)
    for interval_s in intervals_s:
        now_s += interval_s
        rate.note_end(now_s)
    return rate


def test_nothing_known_is_one_second() -> None:
    assert ServiceRate().retry_after_s() == 1.0
    assert rate_after().retry_after_s() == 1.0


def test_it_is_the_time_between_two_ends() -> None:
    assert rate_after(8.0).retry_after_s() == pytest.approx(8.0)
    assert rate_after(8.0, 8.0, 8.0).retry_after_s() == pytest.approx(8.0)


def test_newer_ends_count_more_and_old_ones_fade() -> None:
    assert rate_after(10.0, 20.0).retry_after_s() == pytest.approx(12.0)
    assert rate_after(10.0, 20.0, 2.0).retry_after_s() == pytest.approx(10.0)
    assert rate_after(100.0, *[5.0] * 40).retry_after_s() == pytest.approx(5.0, abs=0.1)


@pytest.mark.parametrize(
    ("interval_s", "expected"), [(0.0, 1.0), (0.01, 1.0), (119.0, 119.0), (500.0, 120.0)]
)
def test_it_lies_between_one_second_and_two_minutes(interval_s: float, expected: float) -> None:
    assert rate_after(interval_s).retry_after_s() == pytest.approx(expected)


def test_idle_time_does_not_count() -> None:
    rate = rate_after(4.0)
    rate.note_idle()
    rate.note_end(5_000.0)  # a request that was aborted before it was started
    assert rate.retry_after_s() == pytest.approx(4.0)
    rate.note_busy(9_000.0)
    rate.note_busy(9_003.0)  # each turn of the loop says so; the first one counts
    rate.note_end(9_004.0)
    assert rate.retry_after_s() == pytest.approx(4.0)
    rate.note_end(9_013.0)
    assert rate.retry_after_s() == pytest.approx(5.0)
