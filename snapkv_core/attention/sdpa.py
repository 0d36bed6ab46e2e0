"""Prefill on PyTorch's `scaled_dot_product_attention`, decode on batched matrix products."""

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from snapkv_core.attention.cpu_prefill import CELL_TOKENS, attend_causally
from snapkv_core.attention.tiled_decode import TiledDecodeBackend


class SdpaBackend(TiledDecodeBackend):
    """For CPU and GPU; on a CPU it computes in float32 whatever the model's number format."""

    name: Final = "sdpa"
    grid_tokens: Final = CELL_TOKENS

    def prefill(self, query: Tensor, keys: Tensor, values: Tensor, *, scaling: float) -> Tensor:
        """See `AttentionBackend.prefill`."""
        if query.device.type == "cpu":
            attended = attend_causally(query.to(keys.dtype), keys, values, scaling=scaling)
            return attended.to(query.dtype)
        positions = torch.arange(keys.shape[1], device=query.device)
        # Not `is_causal`: it aligns the triangle to the top left, which is wrong for queries that
        # have a prefix behind them.
        visible = positions[None, :] <= positions[-query.shape[1] :, None]
        return F.scaled_dot_product_attention(
            query[None].to(keys.dtype),
            keys[None],
            values[None],
            attn_mask=visible,
            scale=scaling,
            enable_gqa=query.shape[0] != keys.shape[0],
        )[0]
