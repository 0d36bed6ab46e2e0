"""When calls to a store that fails are held back, and when it is tried again."""

import pytest

from snapkv_core.kv_cache.circuit_breaker import CircuitBreaker


class Clock:
    """Stands still until a test moves it."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> CircuitBreaker:
    return CircuitBreaker(max_failures=3, open_s=30.0, clock=clock)


def fail(breaker: CircuitBreaker, times: int) -> None:
    for _ in range(times):
        breaker.note_failure()


def test_it_opens_at_the_third_failure_in_a_row(breaker: CircuitBreaker) -> None:
    fail(breaker, 2)
    assert breaker.allows_call()
    fail(breaker, 1)
    assert not breaker.allows_call()


def test_a_success_in_between_starts_the_count_anew(breaker: CircuitBreaker) -> None:
    fail(breaker, 2)
    breaker.note_success()
    fail(breaker, 2)
    assert breaker.allows_call()


def test_one_call_is_let_through_when_the_time_is_over(
    breaker: CircuitBreaker, clock: Clock
) -> None:
    fail(breaker, 3)
    clock.now_s += 29.9
    assert not breaker.allows_call()
    clock.now_s += 0.1
    assert [breaker.allows_call() for _ in range(3)] == [True, False, False]


def test_a_probe_that_fails_holds_calls_back_again(breaker: CircuitBreaker, clock: Clock) -> None:
    fail(breaker, 3)
    clock.now_s += 30.0
    assert breaker.allows_call()
    fail(breaker, 1)
    clock.now_s += 29.0
    assert not breaker.allows_call()


def test_a_probe_that_succeeds_closes_it(breaker: CircuitBreaker, clock: Clock) -> None:
    fail(breaker, 3)
    clock.now_s += 30.0
    assert breaker.allows_call()
    breaker.note_success()
    assert [breaker.allows_call() for _ in range(3)] == [True, True, True]


def test_a_probe_that_never_returns_is_followed_by_another(
    breaker: CircuitBreaker, clock: Clock
) -> None:
    """Whoever was let through may have been cancelled."""
    fail(breaker, 3)
    clock.now_s += 30.0
    assert breaker.allows_call()
    clock.now_s += 30.0
    assert breaker.allows_call()
