"""How long a fetch should take, from what earlier ones took."""

import pytest

from snapkv_core.engine.fetch_speed import FetchSpeed


def test_nothing_known_is_worth_a_try() -> None:
    assert FetchSpeed().expected_s(10**9) == 0.0


def test_a_fetch_takes_its_round_trip_and_its_bytes() -> None:
    speed = FetchSpeed()
    speed.observe_miss(0.01)
    speed.observe_hit(20_000_000, 0.2)
    assert speed.expected_s(50_000_000) == pytest.approx(0.01 + 0.5)


def test_a_new_observation_counts_a_quarter() -> None:
    speed = FetchSpeed()
    speed.observe_hit(100, 1.0)
    speed.observe_hit(500, 1.0)
    assert speed.bytes_per_s == pytest.approx(200.0)
    speed.observe_miss(0.1)
    speed.observe_miss(0.5)
    assert speed.round_trip_s == pytest.approx(0.2)


def test_an_estimate_that_is_a_minute_old_keeps_nobody_from_trying() -> None:
    now_s = 0.0
    speed = FetchSpeed(lambda: now_s)
    speed.observe_hit(100, 1.0)
    now_s = 60.0
    assert speed.expected_s(500) == pytest.approx(5.0)
    now_s = 60.1
    assert speed.expected_s(500) == 0.0


def test_what_is_forgotten_has_no_weight() -> None:
    """A first call that was slow keeps nobody away for longer than a minute."""
    now_s = 0.0
    speed = FetchSpeed(lambda: now_s)
    speed.observe_miss(0.8)
    now_s = 61.0
    speed.observe_miss(0.001)
    assert speed.round_trip_s == 0.001


def test_a_fetch_too_fast_for_the_clock_is_no_error() -> None:
    speed = FetchSpeed()
    speed.observe_hit(1_000, 0.0)
    assert speed.expected_s(1_000) < 0.001
