"""SnapKV for one layer in plain Python loops and 64-bit floats; the slow text of the specification.

Shares no code with `snapkv_core`: it must stay so obvious that reading it is checking it.
"""

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LoopSelection:
    """What the loops keep of one layer.

    Attributes:
        indices: Kept prompt tokens of each KV head, ascending, the window included.
        attention: Mean attention of window and group on each prefix token, by KV head.
        scores: The same after pooling; what the tokens are ranked by.
        kept_attention_mass: Share of the attention on the prefix that kept tokens hold, by KV head.
    """

    indices: list[list[int]]
    attention: list[list[float]]
    scores: list[list[float]]
    kept_attention_mass: list[float]

    def margins(self, budget: int) -> list[float]:
        """Tell, by KV head, how far the nearest different score lies from the cut.

        Scores equal to the last kept one are a true tie, decided by position, so only the
        distance to a score of another value counts; below float32 noise the cut is undecided.
        """
        return [_margin(row, budget) for row in self.scores]


def _margin(row: list[float], budget: int) -> float:
    if budget >= len(row):
        return math.inf
    last_kept = sorted(row, reverse=True)[budget - 1]
    return min((abs(score - last_kept) for score in row if score != last_kept), default=math.inf)


def attention_on_prefix(
    window_queries: Tensor, keys: Tensor, *, scaling: float
) -> list[list[float]]:
    """Average the observation window's attention on every prefix token, by KV head."""
    num_q_heads, window_size, head_dim = window_queries.shape
    num_kv_heads, prompt_len, _ = keys.shape
    group_size = num_q_heads // num_kv_heads
    prefix_len = prompt_len - window_size
    queries = window_queries.double().tolist()
    all_keys = keys.double().tolist()

    result = []
    for kv_head in range(num_kv_heads):
        total = [0.0] * prefix_len
        for member in range(group_size):
            for row in range(window_size):
                query = queries[kv_head * group_size + member][row]
                num_visible = prefix_len + row + 1
                logits = []
                for position in range(num_visible):
                    key = all_keys[kv_head][position]
                    logits.append(scaling * sum(query[i] * key[i] for i in range(head_dim)))
                highest = max(logits)
                weights = [math.exp(logit - highest) for logit in logits]
                denominator = sum(weights)
                for position in range(prefix_len):
                    total[position] += weights[position] / denominator
        result.append([value / (group_size * window_size) for value in total])
    return result


def pool(row: list[float], *, kernel_size: int, pooling: str) -> list[float]:
    """Pool one row over a centred window that is cut off at the two ends."""
    half = kernel_size // 2
    pooled = []
    for centre in range(len(row)):
        around = [row[i] for i in range(centre - half, centre + half + 1) if 0 <= i < len(row)]
        pooled.append(max(around) if pooling == "max" else sum(around) / len(around))
    return pooled


def keep_best(row: list[float], *, budget: int, window_size: int) -> list[int]:
    """Name the `budget` best prefix tokens, the earlier one of equals, and the whole window."""
    ranked = sorted(range(len(row)), key=lambda position: (-row[position], position))
    window = range(len(row), len(row) + window_size)
    return sorted(ranked[:budget]) + list(window)


def attention_mass(row: list[float], kept: list[int]) -> float:
    """Tell which share of a row of prefix attention lies on the kept prefix tokens."""
    kept_prefix = [position for position in kept if position < len(row)]
    return sum(row[position] for position in kept_prefix) / sum(row)


def select_by_loops(
    window_queries: Tensor,
    keys: Tensor,
    *,
    max_capacity_prompt: int,
    kernel_size: int,
    pooling: str,
    scaling: float,
) -> LoopSelection:
    """Compress one layer whose prompt is longer than the capacity.

    Args:
        window_queries: Roped queries `[num_q_heads, window_size, head_dim]`.
        keys: Roped keys of the whole prompt `[num_kv_heads, prompt_len, head_dim]`.
        max_capacity_prompt: Tokens kept per KV head, the window counted in.
        kernel_size: Width of the pooling, odd.
        pooling: `avg` or `max`.
        scaling: Factor on the attention logits.

    Returns:
        The kept tokens of every KV head and how they came about.
    """
    window_size = window_queries.shape[1]
    attention = attention_on_prefix(window_queries, keys, scaling=scaling)
    scores = [pool(row, kernel_size=kernel_size, pooling=pooling) for row in attention]
    budget = max_capacity_prompt - window_size
    indices = [keep_best(row, budget=budget, window_size=window_size) for row in scores]
    mass = [attention_mass(row, kept) for row, kept in zip(attention, indices, strict=True)]
    return LoopSelection(indices, attention, scores, mass)
