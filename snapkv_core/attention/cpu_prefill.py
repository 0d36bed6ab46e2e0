"""Causal attention of a prompt's chunk on a CPU, from PyTorch's flash kernel.

A mask makes that kernel slow, and its own causal mode is right only for queries without a prefix.
So each cell of the prompt attends twice without a mask, to what lies before it and to itself, and
the two are joined by their log-sum-exp. Before it, all query heads of a KV head are rows of one
query, which reads a key once for all of them.
"""

from typing import Final, NamedTuple

import torch
from torch import Tensor

#: Queries that attend together. The kernel chooses its blocks by their number, so chunks are cut
#: into cells at fixed places of the prompt; 512 share the work well between a few cores.
CELL_TOKENS: Final = 512
#: Within a cell the causal mode is used on so many: it computes whole blocks of up to 512 keys.
_CAUSAL_TOKENS: Final = 256


class _Attended(NamedTuple):
    """Attention to some of the keys, `[num_q_heads, len, head_dim]`, and its log-sum-exp."""

    output: Tensor
    lse: Tensor

    def of(self, queries: slice) -> "_Attended":
        """Return that of some of the queries."""
        return _Attended(self.output[:, queries], self.lse[:, queries])


def attend_causally(query: Tensor, keys: Tensor, values: Tensor, *, scaling: float) -> Tensor:
    """See `AttentionBackend.prefill`; all arguments in one number format."""
    chunk_len, num_seen = query.shape[1], keys.shape[1]
    output = torch.empty_like(query)
    for start in range(0, chunk_len, CELL_TOKENS):
        end = min(start + CELL_TOKENS, chunk_len)
        before = num_seen - chunk_len + start
        cell, target = query[:, start:end], output[:, start:end]
        prefix = None
        if before:
            prefix = _all(cell, keys[:, :before], values[:, :before], scaling)
        own = slice(before, before + end - start)
        _attend_cell(cell, keys[:, own], values[:, own], prefix, target, scaling)
    return output


def _attend_cell(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    prefix: _Attended | None,
    target: Tensor,
    scaling: float,
) -> None:
    """Attend causally within a cell, join `prefix`, and write the result to `target`."""
    for start in range(0, query.shape[1], _CAUSAL_TOKENS):
        here = slice(start, start + _CAUSAL_TOKENS)
        piece = query[:, here]
        attended = _flash(piece, keys[:, here], values[:, here], scaling, is_causal=True)
        if start:
            before = _all(piece, keys[:, :start], values[:, :start], scaling)
            joined = torch.lerp(attended.output, before.output, _share(before, attended))
            attended = _Attended(joined, torch.logaddexp(attended.lse, before.lse))
        if prefix is None:
            target[:, here] = attended.output
        else:
            other = prefix.of(here)
            weight = _share(other, attended)
            torch.lerp(attended.output, other.output, weight, out=target[:, here])


def _share(one: _Attended, other: _Attended) -> Tensor:
    """Return the weight of `one` where the two are joined, `[num_q_heads, len, 1]`."""
    return torch.sigmoid(one.lse - other.lse).unsqueeze(-1)


def _all(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> _Attended:
    """Attend to every key."""
    num_q_heads, num_queries, head_dim = query.shape
    rows = query.reshape(keys.shape[0], -1, head_dim)
    output, lse = _flash(rows, keys, values, scaling, is_causal=False)
    return _Attended(
        output.reshape(num_q_heads, num_queries, head_dim), lse.reshape(num_q_heads, num_queries)
    )


def _flash(
    query: Tensor, keys: Tensor, values: Tensor, scaling: float, *, is_causal: bool
) -> _Attended:
    # The public function has no log-sum-exp to offer.
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query[None], keys[None], values[None], 0.0, is_causal, scale=scaling
    )
    return _Attended(output[0], lse[0])
