"""The stand-alone selection function for users who bring their own tensors."""

import torch
from torch import Tensor

from snapkv_core.compression.policies import select_layer
from snapkv_core.config import CompressionConfig


def snapkv_select(
    query_obs: Tensor,
    key_full: Tensor,
    value_full: Tensor,
    max_capacity: int = 4096,
    kernel_size: int = 3,
) -> tuple[Tensor, Tensor]:
    """Select the KV entries of each prompt in a batch of equal, unpadded lengths.

    Args:
        query_obs: Queries of the observation window, after RoPE,
            `[batch, num_q_heads, window_size, head_dim]`.
        key_full: Keys of the prompt, after RoPE, `[batch, num_kv_heads, prompt_len, head_dim]`.
        value_full: Values of the prompt, `[batch, num_kv_heads, prompt_len, value_dim]`.
        max_capacity: Entries to keep per KV head, the window counted in.
        kernel_size: Width in tokens of the average pooling; odd.

    Returns:
        Keys and values `[batch, num_kv_heads, min(prompt_len, max_capacity), ...]` in position
        order. A prompt that fits the capacity comes back whole.

    Raises:
        InvalidParameterError: Even kernel, or a capacity no greater than the window.

    Differs from the often quoted short form, which lets the window look into its own future,
    takes the best tokens from the window too, and counts padding in the average: see
    docs/corrections.md.
    """
    config = CompressionConfig(
        max_capacity_prompt=max_capacity,
        window_size=query_obs.shape[2],
        kernel_size=kernel_size,
    )
    if not config.compresses(key_full.shape[2]):
        return key_full, value_full
    scaling = float(query_obs.shape[-1]) ** -0.5
    kept = torch.stack(
        [
            select_layer(config, queries, keys, scaling=scaling).kept.indices
            for queries, keys in zip(query_obs, key_full, strict=True)
        ]
    )
    return (
        key_full.gather(2, kept.unsqueeze(-1).expand(*kept.shape, key_full.shape[-1])),
        value_full.gather(2, kept.unsqueeze(-1).expand(*kept.shape, value_full.shape[-1])),
    )
