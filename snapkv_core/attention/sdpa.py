"""Reference backend on PyTorch's own operators, for CPU and GPU."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from snapkv_core.attention.base import StoredKV


class SdpaBackend:
    """`scaled_dot_product_attention` for prefill, two matrix products for decode."""

    def prefill(self, query: Tensor, keys: Tensor, values: Tensor, *, scaling: float) -> Tensor:
        """See `AttentionBackend.prefill`."""
        chunk_len, chunk_end = query.shape[1], keys.shape[1]
        # Not `is_causal`: it aligns the triangle to the top left, which is wrong for a chunk
        # that has a prefix behind it.
        positions = torch.arange(chunk_end, device=query.device)
        visible = positions[None, :] <= positions[chunk_end - chunk_len :, None]
        return F.scaled_dot_product_attention(
            query[None],
            keys[None],
            values[None],
            attn_mask=visible,
            scale=scaling,
            enable_gqa=query.shape[0] != keys.shape[0],
        )[0]

    def decode(self, query: Tensor, stored: Sequence[StoredKV], *, scaling: float) -> Tensor:
        """See `AttentionBackend.decode`; sequence by sequence, so neighbours change no bit."""
        output = torch.zeros_like(query)
        for row, kv in enumerate(stored):
            num_kv_heads, max_kv_len, head_dim = kv.keys.shape
            grouped = query[row].view(num_kv_heads, -1, head_dim)
            logits = (grouped @ kv.keys.mT).float() * scaling  # [num_kv_heads, group, max_kv_len]
            if int(kv.kv_lens.min()) < max_kv_len:
                beyond = torch.arange(max_kv_len) >= kv.kv_lens[:, None]
                logits.masked_fill_(beyond[:, None].to(logits.device), float("-inf"))
            weights = logits.softmax(dim=-1).to(kv.values.dtype)
            output[row] = (weights @ kv.values).view(-1, head_dim)
        return output
