"""Attention written out with matrix products: the plain reference, on every device."""

from typing import Final

import torch
from torch import Tensor

from snapkv_core.attention.tiled_decode import TiledDecodeBackend


class MatmulBackend(TiledDecodeBackend):
    """Slower than `SdpaBackend` for long prompts, and free of any fused kernel."""

    name: Final = "matmul"
    grid_tokens: Final = 256

    def prefill(self, query: Tensor, keys: Tensor, values: Tensor, *, scaling: float) -> Tensor:
        """See `AttentionBackend.prefill`."""
        num_kv_heads, num_seen, head_dim = keys.shape
        chunk_len = query.shape[1]
        chunk_start = num_seen - chunk_len
        output = torch.empty_like(query)
        for start in range(0, chunk_len, self.grid_tokens):
            end = min(start + self.grid_tokens, chunk_len)
            positions = torch.arange(chunk_start + end, device=query.device)
            is_future = positions[None, :] > positions[chunk_start + start :, None]
            tile = query[:, start:end].to(keys.dtype)
            grouped = tile.reshape(num_kv_heads, -1, end - start, head_dim)
            # One KV head at a time: all at once would hold every logit of the tile.
            for head in range(num_kv_heads):
                logits = (grouped[head] @ keys[head, : chunk_start + end].mT).float() * scaling
                weights = logits.masked_fill_(is_future, float("-inf")).softmax(-1)
                attended = weights.to(values.dtype) @ values[head, : chunk_start + end]
                group = slice(head * len(attended), (head + 1) * len(attended))
                output[group, start:end] = attended.to(query.dtype)
        return output
