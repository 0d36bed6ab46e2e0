"""Attention of the observation window on the prefix, and the pooling that makes scores of it.

It owns the vote; it must not know budgets, layers or where KV is stored.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from snapkv_core.errors import InvalidParameterError


def observe_prefix(window_queries: Tensor, keys: Tensor, *, scaling: float) -> Tensor:
    """Measure the attention that the observation window pays to each prefix token.

    Args:
        window_queries: Queries of the last `window_size` prompt tokens, after RoPE,
            `[num_q_heads, window_size, head_dim]`.
        keys: Keys of the whole prompt, after RoPE, `[num_kv_heads, prompt_len, head_dim]`.
        scaling: Factor on the logits, usually `head_dim ** -0.5`.

    Returns:
        Mean attention `[num_kv_heads, prefix_len]`, float32, over the window and the query heads
        of each KV head; `prefix_len = prompt_len - window_size`.

    Raises:
        InvalidParameterError: The prompt is no longer than the window, so it has no prefix.

    Source: SnapKV, arXiv:2404.14469, and the authors' snapkv_utils.py (`update_kv`). Differs in
    one point: query heads are averaged into their KV head (ADR 0003).
    """
    _, window_size, head_dim = window_queries.shape
    num_kv_heads, prompt_len, _ = keys.shape
    prefix_len = prompt_len - window_size
    if prefix_len < 1:
        raise InvalidParameterError(
            "window_size", f"a prompt of {prompt_len} tokens has no prefix before {window_size}"
        )
    grouped = window_queries.reshape(num_kv_heads, -1, window_size, head_dim)
    future = torch.ones(window_size, window_size, dtype=torch.bool, device=keys.device).triu(1)
    attention = torch.empty(num_kv_heads, prefix_len, dtype=torch.float32, device=keys.device)
    # One KV head at a time: all heads at once would need num_q_heads * window_size * prompt_len
    # floats, half a gigabyte for a 128K-token prompt of a 7B model.
    for head, (queries, head_keys) in enumerate(zip(grouped, keys, strict=True)):
        logits = (queries @ head_keys.mT).float() * scaling
        logits[..., -window_size:].masked_fill_(future, float("-inf"))
        # Softmax over the whole prompt first, cut the window after: renormalising over the
        # prefix alone would give a query that looks mostly at the window a full vote.
        attention[head] = logits.softmax(dim=-1)[..., :prefix_len].mean(dim=(0, 1))
    return attention


def pool_scores(attention: Tensor, *, kernel_size: int, pooling: str) -> Tensor:
    """Smooth attention over neighbouring tokens, so that whole passages are kept.

    Args:
        attention: Output of `observe_prefix`, `[num_kv_heads, prefix_len]`.
        kernel_size: Width in tokens; odd, 1 changes nothing.
        pooling: `avg` or `max`.

    Returns:
        Scores of the same shape. At the edges only existing tokens count: zeros in the average
        would punish the first tokens, the attention sink among them (ADR 0003).
    """
    padding = kernel_size // 2
    if pooling == "max":
        return F.max_pool1d(attention, kernel_size, stride=1, padding=padding)
    return F.avg_pool1d(attention, kernel_size, stride=1, padding=padding, count_include_pad=False)
