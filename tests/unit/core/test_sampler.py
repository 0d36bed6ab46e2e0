"""Sampling follows the distribution it claims and depends on its arguments only."""

import math
from collections import Counter
from typing import Any

import pytest
import torch

from snapkv_core import SamplingParams
from snapkv_core.engine.sampler import sample_token, uniform_noise

_LOGITS = torch.tensor([2.0, -1.0, 1.5, 0.0, 2.5, -torch.inf, 1.0, 0.5])
_NUM_DRAWS = 4_000


def draw(
    num_draws: int = _NUM_DRAWS, logits: torch.Tensor = _LOGITS, **sampling: Any
) -> Counter[int]:
    """Sample many tokens of one sequence."""
    params = SamplingParams(seed=17, **sampling)
    return Counter(
        sample_token(logits, params, choice_index=0, token_index=i) for i in range(num_draws)
    )


def distribution(*, temperature: float, top_k: int = 0, top_p: float = 1.0) -> dict[int, float]:
    """Compute the probabilities by hand: soften, cut to the likeliest, renormalise."""
    weights = [math.exp(float(logit) / temperature) for logit in _LOGITS]
    ranked = sorted(range(len(weights)), key=lambda token: -weights[token])
    if top_k:
        ranked = ranked[:top_k]
    total = sum(weights[token] for token in ranked)
    kept: list[int] = []
    reached = 0.0
    for token in ranked:
        if reached >= top_p:
            break
        kept.append(token)
        reached += weights[token] / total
    total = sum(weights[token] for token in kept)
    return {token: weights[token] / total for token in kept if weights[token] > 0}


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_k": 1_000},
        {"temperature": 1.0, "top_p": 0.7},
        {"temperature": 1.0, "top_p": 1e-9},
        {"temperature": 2.0, "top_p": 0.9, "top_k": 5},
    ],
)
def test_frequencies_follow_the_distribution(sampling: dict[str, Any]) -> None:
    expected = distribution(**sampling)
    found = draw(**sampling)
    assert set(found) <= set(expected), "a token that was cut off was drawn"
    for token, probability in expected.items():
        deviation = math.sqrt(probability * (1 - probability) / _NUM_DRAWS)
        assert found[token] / _NUM_DRAWS == pytest.approx(probability, abs=4 * deviation + 1e-9)


def test_top_p_stops_at_the_token_that_reaches_it() -> None:
    halves = torch.tensor([0.0, 0.0, -torch.inf])
    assert set(draw(200, halves, temperature=1.0, top_p=0.5)) == {0}
    assert set(draw(200, halves, temperature=1.0, top_p=0.51)) == {0, 1}


def test_greedy_takes_the_largest_and_the_lower_id_of_equals() -> None:
    params = SamplingParams()
    logits = torch.tensor([0.0, 3.0, -1.0, 3.0])
    assert sample_token(logits, params, choice_index=0, token_index=5) == 1


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e-3])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    assert set(draw(50, temperature=temperature)) == {4}


def test_a_huge_temperature_never_draws_an_impossible_token() -> None:
    assert 5 not in draw(temperature=100.0)


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_noise_is_uniform_and_a_function_of_its_arguments(seed: int) -> None:
    noise = [uniform_noise(seed, 0, index) for index in range(2_000)]
    assert noise == [uniform_noise(seed, 0, index) for index in range(2_000)]
    assert all(0.0 <= value < 1.0 for value in noise)
    assert len(set(noise)) == len(noise)
    tenths = Counter(int(value * 10) for value in noise)
    assert all(150 < tenths[tenth] < 250 for tenth in range(10))
    # Neighbouring tokens, choices and seeds must not move together.
    for other in (noise[1:], [uniform_noise(seed, 1, i) for i in range(2_000)]):
        pairs = torch.tensor([noise[: len(other)], other])
        assert abs(float(torch.corrcoef(pairs)[0, 1])) < 0.08


@pytest.mark.parametrize("value", [torch.nan, -torch.inf, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_an_error(value: float, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=1)
    with pytest.raises(ValueError, match="logit"):
        sample_token(torch.full((8,), value), params, choice_index=0, token_index=0)


def test_one_nan_among_numbers_is_an_error() -> None:
    with pytest.raises(ValueError, match="logit"):
        sample_token(
            torch.tensor([1.0, torch.nan, 2.0]), SamplingParams(), choice_index=0, token_index=0
        )
