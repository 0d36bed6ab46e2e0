"""What one decode step reads: every sequence's pages, cut into tiles of a fixed length."""

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from snapkv_core.kv_cache.page_pool import NULL_PAGE, PagePool

#: Tokens that decode attention handles as one unit. Fixed, so that a sequence's sums are formed in
#: the same order whatever its neighbours and the page size are; every page size divides it.
TILE_TOKENS: Final = 64


@dataclass(frozen=True, slots=True)
class TileUnits:
    """One layer's stored KV of a batch as a flat list of tiles, so that ragged heads waste nothing.

    ```text
    row 0 = (sequence 0, head 0)   3 tiles    unit_rows   0 0 0 1 ...
    row 1 = (sequence 0, head 1)   1 tile     row_units   0 1 2 2 / 3 3 3 3 / ...
    ```

    Attributes:
        k_pages: Keys of the whole pool, `[num_pages, page_size, head_dim]`.
        v_pages: Values of the whole pool.
        page_ids: Pages of each unit, `[num_units, pages_per_tile]`, int32; the null page where a
            row has no more.
        unit_rows: Row that a unit belongs to, `[num_units]`, int64.
        unit_bias: Minus infinity at places that hold no token, else zero,
            `[num_units, 1, tile_tokens]`, float32.
        row_units: Units of each row in their order, `[num_rows, width]`, int64; the width is a
            power of two, and a row without so many repeats its last.
        row_bias: Minus infinity for such repeats, else zero, `[num_rows, width, 1]`, float32.
    """

    k_pages: Tensor
    v_pages: Tensor
    page_ids: Tensor
    unit_rows: Tensor
    unit_bias: Tensor
    row_units: Tensor
    row_bias: Tensor


def cut_into_tiles(
    pool: PagePool, page_tables: Tensor, kv_lens: Tensor, page_size: int
) -> list[TileUnits]:
    """Describe what each layer of a decode step reads.

    Args:
        pool: Where the pages are.
        page_tables: Tables of the batch, `[num_layers, num_seqs, num_kv_heads, width]`, int32, CPU.
        kv_lens: Tokens stored, the new one included, `[num_layers, num_seqs, num_kv_heads]`.
        page_size: Tokens in a page.

    Returns:
        One entry per layer, on the pool's device.
    """
    num_layers = len(kv_lens)
    pages_per_tile = TILE_TOKENS // page_size
    max_tiles = -(-int(kv_lens.max()) // TILE_TOKENS)
    missing = max_tiles * pages_per_tile - page_tables.shape[-1]
    padded = F.pad(page_tables, (0, missing), value=NULL_PAGE)  # a negative pad cuts off
    tables = padded.reshape(num_layers, -1, max_tiles, pages_per_tile)
    lens = kv_lens.reshape(num_layers, -1)
    is_uniform = bool((lens == lens[0]).all())
    device = pool.k_pages.device
    layers: list[TileUnits] = []
    for layer_idx in range(num_layers):
        # Most policies give all layers the same lengths: then one description serves them all.
        if layer_idx == 0 or not is_uniform:
            rows, tiles, described = _describe(lens[layer_idx], max_tiles)
            described = [part.to(device) for part in described]
        page_ids = tables[layer_idx, rows, tiles].to(device)
        layers.append(TileUnits(pool.k_pages, pool.v_pages, page_ids, *described))
    return layers


def _describe(lens: Tensor, max_tiles: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Lay out the tiles of rows of `lens` tokens, `[num_rows]`.

    Returns:
        Row and tile of each unit, and the last four attributes of `TileUnits`.
    """
    starts = torch.arange(max_tiles) * TILE_TOKENS
    rows, tiles = (starts[None, :] < lens[:, None]).nonzero(as_tuple=True)
    places = starts[tiles, None] + torch.arange(TILE_TOKENS)
    unit_bias = _minus_infinity_where(places >= lens[rows, None])
    width = 1 << (max_tiles - 1).bit_length()
    num_tiles = -(-lens // TILE_TOKENS)
    firsts = num_tiles.cumsum(0) - num_tiles
    slots = torch.arange(width)
    row_units = firsts[:, None] + torch.minimum(slots[None, :], num_tiles[:, None] - 1)
    row_bias = _minus_infinity_where(slots[None, :] >= num_tiles[:, None])
    return rows, tiles, [rows, unit_bias.unsqueeze(1), row_units, row_bias.unsqueeze(-1)]


def _minus_infinity_where(is_hidden: Tensor) -> Tensor:
    return torch.zeros(is_hidden.shape).masked_fill_(is_hidden, float("-inf"))
