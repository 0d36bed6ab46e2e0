"""Local sampling: a reservoir for each second, and a share of what comes beyond it."""

from itertools import cycle

from app.telemetry.tracing.sampling import LocalSampler


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        """Tell the time."""
        return self.now_s


def test_reservoir_is_filled_again_each_second() -> None:
    clock = Clock()
    sampler = LocalSampler(2, 0.0, clock=clock)
    decisions = []
    for now_s in (100.0, 100.1, 100.9, 101.0, 101.5, 101.6, 105.0):
        clock.now_s = now_s
        decisions.append(sampler.take())
    assert decisions == [True, True, False, True, True, False, True]


def test_rate_counts_beyond_the_reservoir() -> None:
    draws = cycle([0.0, 0.24, 0.25, 0.99])
    sampler = LocalSampler(1, 0.25, clock=Clock(), draw=lambda: next(draws))
    assert [sampler.take() for _ in range(9)] == [True, *[True, True, False, False] * 2]


def test_nothing_and_everything() -> None:
    assert not any(LocalSampler(0, 0.0).take() for _ in range(100))
    assert all(LocalSampler(0, 1.0).take() for _ in range(100))
