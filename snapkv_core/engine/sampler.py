"""Logits to token ids; the noise is a function of (seed, choice, token index) alone (ADR 0004)."""

from typing import Final

import torch
from torch import Tensor

from snapkv_core.sampling_params import SamplingParams

_MASK_64: Final = 2**64 - 1
_GOLDEN_GAMMA: Final = 0x9E3779B97F4A7C15


def uniform_noise(seed: int, choice_index: int, token_index: int) -> float:
    """Return a number in [0, 1) that depends on its arguments only, on every machine.

    SplitMix64's finaliser, chained over the three numbers. No generator state exists, so an
    answer can be continued elsewhere and does not depend on its neighbours.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    mixed = 0
    for part in (seed, choice_index, token_index):
        mixed = (mixed ^ part) + _GOLDEN_GAMMA & _MASK_64
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK_64
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK_64
        mixed ^= mixed >> 31
    return (mixed >> 11) / 2**53


def sample_token(
    logits: Tensor, sampling: SamplingParams, *, choice_index: int, token_index: int
) -> int:
    """Choose the next token of one sequence.

    Args:
        logits: `[vocab_size]`, float32.
        sampling: Parameters with `seed` filled in when `temperature` is not 0.
        choice_index: Which of the request's answers this is.
        token_index: How many tokens the answer has already.

    Returns:
        A token id; on equal logits the lower id wins.

    Raises:
        ValueError: No logit is a finite number, so there is nothing to choose from.
    """
    # A NaN anywhere, or nothing above minus infinity, means that the sequence's state is broken.
    if not torch.isfinite(logits.max()):
        raise ValueError("the model gave no finite logit")
    if sampling.temperature == 0:
        return int(logits.argmax())
    assert sampling.seed is not None, "submit() fills in the seed"
    noise = uniform_noise(sampling.seed, choice_index, token_index)
    candidates, probabilities = _candidates(logits, sampling)
    # Inverse of the cumulative distribution, in float64: 49,152 float32 sums drift visibly.
    cumulative = probabilities.double().cumsum(0)
    position = int(torch.searchsorted(cumulative, noise * float(cumulative[-1]), right=True))
    return int(candidates[min(position, len(candidates) - 1)])


def _candidates(logits: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    """Return token ids and their unnormalised probabilities after top-k, then top-p."""
    # Subtracted first: a tiny temperature would otherwise divide to infinity.
    scaled = (logits - logits.max()).double() / sampling.temperature
    if sampling.top_k == 0 and sampling.top_p >= 1:
        return torch.arange(len(logits), device=logits.device), scaled.exp()
    ranked = scaled.sort(descending=True, stable=True)
    ids, probabilities = ranked.indices, ranked.values.exp()
    if 0 < sampling.top_k < len(ids):
        ids, probabilities = ids[: sampling.top_k], probabilities[: sampling.top_k]
    if sampling.top_p < 1:
        before = probabilities.cumsum(0) - probabilities
        # Strictly less: a token stays while those before it do not reach top_p yet.
        num_kept = max(1, int((before < sampling.top_p * probabilities.sum()).sum()))
        ids, probabilities = ids[:num_kept], probabilities[:num_kept]
    return ids, probabilities
