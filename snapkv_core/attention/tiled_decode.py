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
        grouped = (query.float() * scaling).reshape(stored.num_rows, -1, head_dim)
        combiner = _TileCombiner(stored, grouped)
        num_units, tile_tokens = len(stored.unit_rows), stored.is_empty.shape[1]
        per_group = max(1, _GROUP_BYTES // (tile_tokens * head_dim * 4))
        for start in range(0, num_units, per_group):
            units = slice(start, min(start + per_group, num_units))
            keys = self.gather(stored.k_pages, stored.page_ids[units])
            # Logits of each unit's queries, [num_units, group_size, tile_tokens].
            logits = torch.bmm(grouped[stored.unit_rows[units]], keys.mT)
            _hide_empty_places(logits, stored, units)
            largest = logits.amax(-1)
            weights = logits.sub_(largest.unsqueeze(-1)).exp_()
            values = self.gather(stored.v_pages, stored.page_ids[units])
            combiner.put(units, torch.bmm(weights, values), weights.sum(-1), largest)
        return combiner.result().reshape(num_seqs, num_q_heads, head_dim).to(query.dtype)

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


def _hide_empty_places(logits: Tensor, stored: PagedKV, units: slice) -> None:
    """Set logits of places without a token to minus infinity; only a row's last unit has any."""
    first, end = torch.searchsorted(
        stored.last_units, torch.tensor((units.start, units.stop))
    ).tolist()
    at = (stored.last_units[first:end] - units.start).to(logits.device)
    hidden = stored.is_empty[first:end].unsqueeze(1)
    logits.index_copy_(0, at, logits[at].masked_fill_(hidden, float("-inf")))


class _TileCombiner:
    """Partial softmax sums of tiles, brought together per row in the order of the tiles."""

    def __init__(self, stored: PagedKV, grouped: Tensor) -> None:
        num_rows, group_size, head_dim = grouped.shape
        shape = (num_rows, stored.max_tiles, group_size)
        self._places = (stored.unit_rows, stored.unit_tiles)
        # The last column of the sums is the sum of weights. A tile that a row does not have
        # weighs exp(-inf) = 0.
        self._sums = grouped.new_zeros(*shape, head_dim + 1)
        self._largest = grouped.new_full(shape, float("-inf"))

    def put(self, units: slice, outputs: Tensor, totals: Tensor, largest: Tensor) -> None:
        """Take the sums of some units."""
        at = (self._places[0][units], self._places[1][units])
        self._sums.index_put_(at, torch.cat((outputs, totals.unsqueeze(-1)), dim=-1))
        self._largest.index_put_(at, largest)

    def result(self) -> Tensor:
        """Return attention `[num_rows, group_size, head_dim]`, float32."""
        scales = (self._largest - self._largest.amax(1, keepdim=True)).exp_()
        combined = _sum_in_pairs(self._sums.mul_(scales.unsqueeze(-1)))
        return combined[..., :-1] / combined[..., -1:]


def _sum_in_pairs(parts: Tensor) -> Tensor:
    """Sum over dimension 1 in a tree of neighbours: zeros that follow change no bit of it."""
    while parts.shape[1] > 1:
        num_pairs = parts.shape[1] // 2
        paired = parts[:, 0 : 2 * num_pairs : 2] + parts[:, 1 : 2 * num_pairs : 2]
        if parts.shape[1] % 2:
            paired = torch.cat((paired, parts[:, -1:]), dim=1)
        parts = paired
    return parts[:, 0]
