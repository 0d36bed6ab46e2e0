"""Greedy answers with penalties and biases by the formula, over a whole forward for each token."""

from collections.abc import Mapping
from typing import Any

import torch


@torch.no_grad()
def penalised_greedy(
    model: Any,
    prompt: tuple[int, ...],
    num_tokens: int,
    *,
    presence: float = 0.0,
    frequency: float = 0.0,
    bias: Mapping[int, float] | None = None,
) -> list[int]:
    """Return the tokens that a transformers model answers with; no end token ends it."""
    answer: list[int] = []
    for _ in range(num_tokens):
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0, -1].double().tolist()
        best, best_value = -1, float("-inf")
        for token, logit in enumerate(logits):
            count = answer.count(token)
            value = logit - frequency * count - (presence if count > 0 else 0.0)
            value += (bias or {}).get(token, 0.0)
            if value > best_value:
                best, best_value = token, value
        answer.append(best)
    return answer
