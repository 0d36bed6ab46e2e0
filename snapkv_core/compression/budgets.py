"""How many prefix tokens each KV head of a layer may keep."""

import torch
from torch import Tensor


def uniform_budgets(*, num_kv_heads: int, max_capacity_prompt: int, window_size: int) -> Tensor:
    """Give every KV head what the capacity leaves after the window.

    Returns:
        Budgets in tokens, `[num_kv_heads]`, int64, on the CPU.
    """
    return torch.full((num_kv_heads,), max_capacity_prompt - window_size, dtype=torch.int64)
