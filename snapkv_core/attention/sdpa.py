"""Prefill on PyTorch's `scaled_dot_product_attention`, decode on batched matrix products."""

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from snapkv_core.attention.tiled_decode import TiledDecodeBackend


class SdpaBackend(TiledDecodeBackend):
    """For CPU and GPU; on a CPU it computes in float32 whatever the model's number format."""

    name: Final = "sdpa"
    #: Kernels choose their blocks by the number of queries, so each call has this many.
    grid_tokens: Final = 256

    def prefill(self, query: Tensor, keys: Tensor, values: Tensor, *, scaling: float) -> Tensor:
        """See `AttentionBackend.prefill`."""
        num_q_heads, chunk_len, _ = query.shape
        chunk_start = keys.shape[1] - chunk_len
        output = torch.empty_like(query)
        positions = torch.arange(keys.shape[1], device=query.device)
        for start in range(0, chunk_len, self.grid_tokens):
            end = min(start + self.grid_tokens, chunk_len)
            seen = chunk_start + end
            # Not `is_causal`: it aligns the triangle to the top left, which is wrong for queries
            # that have a prefix behind them.
            visible = positions[None, :seen] <= positions[chunk_start + start : seen, None]
            output[:, start:end] = F.scaled_dot_product_attention(
                query[None, :, start:end].to(keys.dtype),
                keys[None, :, :seen],
                values[None, :, :seen],
                attn_mask=visible,
                scale=scaling,
                enable_gqa=num_q_heads != keys.shape[0],
            )[0]
        return output
