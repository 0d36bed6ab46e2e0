"""From scores and budgets to the indices of the kept tokens, ragged over KV heads."""

from dataclasses import dataclass

import torch
from torch import Tensor

from snapkv_core.errors import InvalidParameterError


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """Prompt tokens that one layer keeps.

    ```text
    indices   head 0  [ 0  3  7 | 20 21 ]      lengths [5, 4]
              head 1  [ 5  6 | 20 21 ] pad
    ```

    Attributes:
        indices: `[num_kv_heads, max_kept]`, int64, ascending in each row up to its length; the
            rest of a shorter row repeats the last prompt token and must not be read.
        lengths: Tokens kept per KV head, window included, `[num_kv_heads]`, int64, on the CPU.
    """

    indices: Tensor
    lengths: Tensor


def select_tokens(scores: Tensor, budgets: Tensor, *, window_size: int) -> KeptTokens:
    """Keep each head's best prefix tokens, in position order, and the whole window by index.

    Args:
        scores: `[num_kv_heads, prefix_len]`, float32.
        budgets: Prefix tokens to keep per head, `[num_kv_heads]`, int64, on the CPU: storage is
            allocated from them, so they must not cost a device sync.
        window_size: Tokens that follow the prefix and are always kept.

    Returns:
        The kept tokens. On equal scores the earlier token wins, on every device.

    Raises:
        InvalidParameterError: A budget is negative or exceeds the prefix.
    """
    num_kv_heads, prefix_len = scores.shape
    max_budget = int(budgets.max())
    if int(budgets.min()) < 0 or max_budget > prefix_len:
        raise InvalidParameterError(
            "budgets", f"must lie between 0 and the {prefix_len} tokens of the prefix"
        )
    # torch.topk promises no order among equal scores; a stable sort does.
    ranked = scores.sort(dim=-1, descending=True, stable=True).indices[:, :max_budget]
    beyond_budget = torch.arange(max_budget) >= budgets[:, None]
    prompt_len = prefix_len + window_size
    prefix = ranked.masked_fill(beyond_budget.to(scores.device), prompt_len)
    window = torch.arange(prefix_len, prompt_len, device=scores.device).expand(num_kv_heads, -1)
    # A shorter head's padding sorts behind its window and is then made a legal index.
    indices = torch.cat((prefix, window), dim=-1).sort(dim=-1).values.clamp(max=prompt_len - 1)
    return KeptTokens(indices=indices, lengths=budgets + window_size)
