"""Decode attention on PyTorch's batched matrix products, tile by tile, in float32.

Every tile has the same shape and a row's tiles are summed in a fixed tree, so a sequence's numbers
do not depend on what else is in the batch (ADR 0010).
"""

from typing import Final

import torch
from torch import Tensor

from snapkv_core.attention.base import PagedKV

#: Keys or values of so many bytes are handled at once: they must stay in a CPU's cache between
#: being gathered and being multiplied.
_GROUP_BYTES: Final = 4 * 1024 * 1024


class TiledDecode:
    """Decode attention with scratch memory of its own; one thread at a time may use it.

    Memory that is allocated anew in each of hundreds of calls a step costs as much as the products.
    """

    def __init__(self) -> None:
        self._scratch: dict[str, Tensor] = {}

    def run(self, query: Tensor, stored: PagedKV, *, scaling: float) -> Tensor:
        """See `AttentionBackend.decode`."""
        num_seqs, num_q_heads, head_dim = query.shape
        num_units, tile_tokens = len(stored.unit_rows), stored.unit_bias.shape[-1]
        grouped = (query.float() * scaling).reshape(len(stored.row_units), -1, head_dim)
        queries = grouped.index_select(0, stored.unit_rows)
        per_group = max(1, _GROUP_BYTES // (tile_tokens * head_dim * 4))
        parts = [
            self._attend(queries[start:end], stored, slice(start, end))
            for start in range(0, num_units, per_group)
            for end in (min(start + per_group, num_units),)
        ]
        sums, largest = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
        output = _combine(sums, largest, stored)
        return output.reshape(num_seqs, num_q_heads, head_dim).to(query.dtype)

    def _attend(self, queries: Tensor, stored: PagedKV, units: slice) -> tuple[Tensor, Tensor]:
        """Attend within some tiles, each by itself.

        Args:
            queries: Of each of these units, `[num_units, group_size, head_dim]`.
            stored: All units.
            units: Which of them.

        Returns:
            Weighted sums of values and, as the last column, the sum of weights,
            `[num_units, group_size, head_dim + 1]`; the largest logit that weights are relative
            to, `[num_units, group_size]`.
        """
        page_ids = stored.page_ids[units]
        keys = self.gather(stored.k_pages, page_ids)
        logits = torch.bmm(queries, keys.mT).add_(stored.unit_bias[units])
        largest = logits.amax(-1, keepdim=True)
        weights = logits.sub_(largest).exp_()
        values = self.gather(stored.v_pages, page_ids)
        sums = torch.cat((torch.bmm(weights, values), weights.sum(-1, keepdim=True)), dim=-1)
        return sums, largest.squeeze(-1)

    def gather(self, pages: Tensor, page_ids: Tensor) -> Tensor:
        """Bring the pages of some units together.

        Args:
            pages: `[num_pages, page_size, head_dim]`.
            page_ids: `[num_units, pages_per_tile]`.

        Returns:
            Tiles `[num_units, tile_tokens, head_dim]`, float32, until the next call.
        """
        gathered = self._buffer("pages", (page_ids.numel(), *pages.shape[1:]), pages)
        torch.index_select(pages, 0, page_ids.flatten(), out=gathered)
        return self.as_tiles(gathered, len(page_ids))

    def as_tiles(self, gathered: Tensor, num_units: int) -> Tensor:
        """Return pages that lie one after another as tiles in float32."""
        if gathered.dtype is not torch.float32:
            converted = self._buffer("float32", gathered.shape, gathered, torch.float32)
            gathered = converted.copy_(gathered)
        return gathered.reshape(num_units, -1, gathered.shape[-1])

    def _buffer(
        self, name: str, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return scratch memory of a shape; what it held before is lost."""
        size = torch.Size(shape).numel()
        kept = self._scratch.get(name)
        if kept is None or len(kept) < size:
            kept = self._scratch[name] = like.new_empty(size, dtype=dtype)
        return kept[:size].view(shape)


class TiledDecodeBackend:
    """The decode half that backends share whose kernels are for prefill.

    Attributes:
        decode_kernel: What computes decode attention.
    """

    def __init__(self) -> None:
        self.decode_kernel = TiledDecode()

    def decode(self, query: Tensor, stored: PagedKV, *, scaling: float) -> Tensor:
        """See `AttentionBackend.decode`."""
        return self.decode_kernel.run(query, stored, scaling=scaling)


def _combine(sums: Tensor, largest: Tensor, stored: PagedKV) -> Tensor:
    """Bring the partial softmax sums of each row's tiles together.

    Args:
        sums: `[num_units, group_size, head_dim + 1]`, see `TiledDecode._attend`.
        largest: `[num_units, group_size]`.
        stored: Which units make a row.

    Returns:
        Attention `[num_rows, group_size, head_dim]`, float32.
    """
    num_rows, width = stored.row_units.shape
    units = stored.row_units.flatten()
    # A repeat weighs exp(-inf) = 0. It is of the row itself, since zero times the NaN of another
    # sequence would still be NaN.
    logits = largest.index_select(0, units).view(num_rows, width, -1) + stored.row_bias
    scales = logits.sub_(logits.amax(1, keepdim=True)).exp_().unsqueeze(-1)
    parts = sums.index_select(0, units).view(num_rows, width, *sums.shape[1:]).mul_(scales)
    # A tree of neighbours: zeros that follow change no bit of it.
    while width > 1:
        parts = parts[:, 0::2] + parts[:, 1::2]
        width //= 2
    combined = parts[:, 0]
    return combined[..., :-1] / combined[..., -1:]
