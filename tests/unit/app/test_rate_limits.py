"""Rate limits against a list of everything that was ever charged."""

import random

import pytest

from app.services.ceilings import OverCeilingError
from app.services.rate_limits import Grant, Quotas, RateLimitedError, RateState
from app.setting_groups.key_limits import KeyLimits
from snapkv_core import CompressionConfig, GenerationRequest, RequestSize, SamplingParams

PROMPT = GenerationRequest("r", "p", SamplingParams(), CompressionConfig())


class Clock:
    """A clock that tests turn; in sixteenths, so that sums of times are exact."""

    now_s = 1_000.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now_s


def quotas_with(clock: Clock, **limits: int) -> Quotas:
    return Quotas({"default": KeyLimits(**limits)}, clock)


def send(quotas: Quotas, num_tokens: int, caller: str = "a") -> None:
    grant = quotas.grant(caller, PROMPT)
    try:
        grant.admit(RequestSize(num_tokens - 1, 1, 1))
    except (RateLimitedError, OverCeilingError):
        grant.cancel()
        raise


def ask(quotas: Quotas, size: RequestSize) -> tuple[Grant | None, float]:
    """Return what was granted, or else the time to wait."""
    try:
        grant = quotas.grant("a", PROMPT)
    except RateLimitedError as error:
        return None, error.retry_after_s
    try:
        grant.admit(size)
    except RateLimitedError as error:
        grant.cancel()
        return None, error.retry_after_s
    return grant, 0.0


def test_no_minute_has_more_than_the_limits_and_the_time_to_wait_is_exact() -> None:
    """Requests of random sizes at random times, some of which give tokens back."""
    max_requests, max_tokens = 7, 100
    num_refused = 0
    for seed in range(40):
        rng, clock = random.Random(seed), Clock()
        quotas = quotas_with(clock, requests_per_minute=max_requests, tokens_per_minute=max_tokens)
        charged: list[list[float]] = []  # time and tokens
        for _ in range(120):
            clock.now_s += rng.choice((0.0, 0.5, 4.0, 25.0, 60.0))
            now_s = clock.now_s
            size = RequestSize(rng.randint(1, 40), rng.randint(1, 10), rng.randint(1, 3))
            num_tokens = size.num_prompt_tokens + size.max_new_tokens * size.num_choices

            def is_free(
                at_s: float, num_tokens: int = num_tokens, charged: list[list[float]] = charged
            ) -> bool:
                recent = [tokens for time_s, tokens in charged if at_s - time_s < 60.0]
                return len(recent) < max_requests and sum(recent) + num_tokens <= max_tokens

            grant, wait_s = ask(quotas, size)
            if grant is None:
                num_refused += 1
                assert not is_free(now_s)
                # One of the two limits is told of; the other may need longer.
                if sum(now_s - time_s < 60.0 for time_s, _ in charged) < max_requests:
                    assert is_free(now_s + wait_s)
                    assert not is_free(now_s + wait_s - 0.25)
                continue
            assert is_free(now_s)
            used = rng.choice((num_tokens, size.num_prompt_tokens, size.num_prompt_tokens + 1))
            charged.append([now_s, num_tokens])
            if rng.random() < 0.7:
                grant.settle(used)
                charged[-1][1] = used
    assert num_refused > 200


def test_the_request_after_the_limit_waits_for_the_first_to_be_a_minute_old() -> None:
    clock = Clock()
    quotas = quotas_with(clock, requests_per_minute=2)
    send(quotas, 5)
    clock.now_s += 10
    send(quotas, 5)
    clock.now_s += 10
    with pytest.raises(RateLimitedError, match="2 requests a minute") as refused:
        send(quotas, 5)
    assert refused.value.retry_after_s == 40
    send(quotas, 5, caller="b")  # others have their own
    clock.now_s += 39.75
    with pytest.raises(RateLimitedError):
        send(quotas, 5)
    clock.now_s += 0.25
    send(quotas, 5)


def test_a_refused_request_leaves_no_trace() -> None:
    quotas = quotas_with(Clock(), requests_per_minute=3, tokens_per_minute=50)
    before = quotas.states_of("a")
    grant = quotas.grant("a", PROMPT)
    grant.admit(RequestSize(10, 5, 2))
    assert [state.remaining for state in quotas.states_of("a")] == [2, 30]
    grant.cancel()
    assert quotas.states_of("a") == before
    send(quotas, 40)
    kept = quotas.states_of("a")
    with pytest.raises(RateLimitedError):
        send(quotas, 11)
    assert quotas.states_of("a") == kept


def test_what_alone_exceeds_a_minute_is_never_worth_waiting_for() -> None:
    quotas = quotas_with(Clock(), tokens_per_minute=50)
    for size, field in (
        (RequestSize(30, 7, 3), "max_new_tokens"),
        (RequestSize(60, 1, 1), "prompt"),
    ):
        grant = quotas.grant("a", PROMPT)
        with pytest.raises(OverCeilingError) as refused:
            grant.admit(size)
        needed = size.num_prompt_tokens + size.max_new_tokens * size.num_choices
        assert (refused.value.field, refused.value.requested) == (field, needed)
        assert refused.value.ceiling == 50


def test_tokens_given_back_after_their_minute_are_not_given_twice() -> None:
    clock = Clock()
    quotas = quotas_with(clock, tokens_per_minute=50)
    grant = quotas.grant("a", PROMPT)
    grant.admit(RequestSize(10, 40, 1))
    clock.now_s += 61
    send(quotas, 50)
    grant.settle(11)
    assert quotas.states_of("a") == [RateState("tokens", 50, 0, 60.0)]


def test_new_limits_count_what_was_used_before() -> None:
    clock = Clock()
    quotas = quotas_with(clock, requests_per_minute=100)
    for _ in range(5):
        send(quotas, 5)
    quotas.use_limits({"default": KeyLimits(requests_per_minute=5)})
    with pytest.raises(RateLimitedError):
        send(quotas, 5)
    assert quotas.states_of("a") == [RateState("requests", 5, 0, 60.0)]
    quotas.use_limits({})
    send(quotas, 5)
    assert quotas.states_of("a") == []


def test_lowered_limits_say_when_the_next_request_fits() -> None:
    clock = Clock()
    quotas = quotas_with(clock, requests_per_minute=10)
    for _ in range(5):
        send(quotas, 5)
        clock.now_s += 1
    quotas.use_limits({"default": KeyLimits(requests_per_minute=2)})
    with pytest.raises(RateLimitedError) as refused:
        send(quotas, 5)
    assert refused.value.retry_after_s == 58  # until four of the five are gone
    clock.now_s += 58
    send(quotas, 5)
