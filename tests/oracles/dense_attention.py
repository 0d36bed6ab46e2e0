"""Attention in float64, one query head and one query at a time; shares no code with the engine."""

import math

import torch
from torch import Tensor


def attend(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """Attend from one query `[head_dim]` to keys and values `[num_tokens, head_dim]`."""
    logits = [float(torch.dot(query.double(), key.double())) * scaling for key in keys]
    largest = max(logits)
    weights = [math.exp(logit - largest) for logit in logits]
    total = sum(weights)
    return torch.einsum(
        "t,td->d", torch.tensor(weights, dtype=torch.float64) / total, values.double()
    )


def causal(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """Attend from the last tokens of a prompt to all before them.

    Args:
        query: `[num_q_heads, num_queries, head_dim]`.
        keys: `[num_kv_heads, num_keys, head_dim]`; the last belongs to the last query.
        values: The same for values.
        scaling: Factor on the logits.
    """
    num_q_heads, num_queries, _ = query.shape
    num_kv_heads, num_keys, _ = keys.shape
    output = torch.zeros(query.shape, dtype=torch.float64)
    for head in range(num_q_heads):
        kv_head = head * num_kv_heads // num_q_heads
        for row in range(num_queries):
            end = num_keys - num_queries + row + 1
            output[head, row] = attend(
                query[head, row], keys[kv_head, :end], values[kv_head, :end], scaling
            )
    return output


def causal_einsum(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """Do the same in one piece, for sizes at which loops take too long."""
    num_q_heads, num_queries, _ = query.shape
    num_keys = keys.shape[1]
    group_size = num_q_heads // keys.shape[0]
    keys, values = (x.double().repeat_interleave(group_size, 0) for x in (keys, values))
    logits = torch.einsum("hqd,hkd->hqk", query.double(), keys) * scaling
    positions = torch.arange(num_keys - num_queries, num_keys)
    logits[:, torch.arange(num_keys) > positions[:, None]] = -math.inf
    return torch.einsum("hqk,hkd->hqd", logits.softmax(-1), values)
