"""How long a fetch should take, from what earlier ones took."""

from pytest import approx

from snapkv_core.engine.fetch_speed import FetchSpeed


def test_nothing_known_is_worth_a_try() -> None:
    assert FetchSpeed().expected_s(10**9) == 0.0


def test_a_fetch_takes_its_round_trip_and_its_bytes() -> None:
    speed = FetchSpeed()
    speed.observe_miss(0.01)
    speed.observe_hit(20_000_000, 0.2)
    assert speed.expected_s(50_000_000) == approx(0.01 + 0.5)


def test_a_new_observation_counts_a_quarter() -> None:
    speed = FetchSpeed()
    speed.observe_hit(100, 1.0)
    speed.observe_hit(500, 1.0)
    assert speed.bytes_per_s == approx(200.0)
    speed.observe_miss(0.1)
    speed.observe_miss(0.5)
    assert speed.round_trip_s == approx(0.2)


def test_a_fetch_too_fast_for_the_clock_is_no_error() -> None:
    speed = FetchSpeed()
    speed.observe_hit(1_000, 0.0)
    assert speed.expected_s(1_000) < 0.001
