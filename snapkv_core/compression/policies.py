"""Policies: a method's name to its composition of observation, budgets and selection."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from torch import Tensor

from snapkv_core.compression.budgets import uniform_budgets
from snapkv_core.compression.observation import observe_prefix, pool_scores
from snapkv_core.compression.selection import KeptTokens, select_tokens
from snapkv_core.config import CompressionConfig


@dataclass(frozen=True, slots=True)
class LayerSelection:
    """What one layer keeps of a prompt, and how much of the vote that is.

    Attributes:
        kept: The kept tokens.
        kept_attention_mass: Share of the window's attention to the prefix that the kept prefix
            tokens hold, per KV head, `[num_kv_heads]`, float32.
    """

    kept: KeptTokens
    kept_attention_mass: Tensor


def select_layer(
    config: CompressionConfig, window_queries: Tensor, keys: Tensor, *, scaling: float
) -> LayerSelection:
    """Choose what one layer keeps of a prompt that `config.compresses`.

    Args:
        config: Method and knobs.
        window_queries: Queries of the last `window_size` prompt tokens, after RoPE,
            `[num_q_heads, window_size, head_dim]`.
        keys: Keys of the whole prompt, after RoPE, `[num_kv_heads, prompt_len, head_dim]`.
        scaling: Factor on the attention logits.

    Returns:
        Kept tokens and kept attention mass.
    """
    return _POLICIES[config.method](config, window_queries, keys, scaling)


def _snapkv(
    config: CompressionConfig, window_queries: Tensor, keys: Tensor, scaling: float
) -> LayerSelection:
    attention = observe_prefix(window_queries, keys, scaling=scaling)
    scores = pool_scores(attention, kernel_size=config.kernel_size, pooling=config.pooling)
    budgets = uniform_budgets(
        num_kv_heads=keys.shape[0],
        max_capacity_prompt=config.max_capacity_prompt,
        window_size=config.window_size,
    )
    kept = select_tokens(scores, budgets, window_size=config.window_size)
    return LayerSelection(kept, _kept_attention_mass(attention, kept, config.window_size))


def _kept_attention_mass(attention: Tensor, kept: KeptTokens, window_size: int) -> Tensor:
    """Return the share of `attention` [num_kv_heads, prefix_len] that the kept tokens hold."""
    num_kv_heads, prefix_len = attention.shape
    is_kept = attention.new_zeros(num_kv_heads, prefix_len + window_size)
    # Padding repeats the last prompt token, which the window keeps anyway.
    is_kept.scatter_(1, kept.indices, 1.0)
    held = (attention * is_kept[:, :prefix_len]).sum(dim=-1)
    # A window that pays the prefix no attention at all loses none of it.
    total = attention.sum(dim=-1)
    return (held / total).where(total > 0, 1.0)


_Policy = Callable[[CompressionConfig, Tensor, Tensor, float], LayerSelection]

_POLICIES: Final[Mapping[str, _Policy]] = MappingProxyType({"snapkv": _snapkv})
