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
    row 0 = (sequence 0, head 0)   tiles 0 1 2      unit_rows   0 0 0 1 ...
    row 1 = (sequence 0, head 1)   tiles 0          unit_tiles  0 1 2 0 ...
    ```

    Attributes:
        k_pages: Keys of the whole pool, `[num_pages, page_size, head_dim]`.
        v_pages: Values of the whole pool.
        page_ids: Pages of each unit, `[num_units, pages_per_tile]`, int32; the null page where a
            row has no more.
        unit_rows: Row that a unit belongs to, `[num_units]`, int64.
        unit_tiles: Which of the row's tiles it is, `[num_units]`, int64.
        last_units: The last unit of each row, which alone may be partly empty, `[num_rows]`,
            int64, on the CPU.
        is_empty: Places of those units that hold no token, `[num_rows, tile_tokens]`, bool.
        num_rows: Sequences times KV heads.
        max_tiles: Most tiles of any row.
    """

    k_pages: Tensor
    v_pages: Tensor
    page_ids: Tensor
    unit_rows: Tensor
    unit_tiles: Tensor
    last_units: Tensor
    is_empty: Tensor
    num_rows: int
    max_tiles: int


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
    layers: list[TileUnits] = []
    for layer_idx in range(num_layers):
        # Most policies give all layers the same lengths: then one description serves them all.
        if layer_idx == 0 or not is_uniform:
            rows, tiles, last, is_empty = _units(lens[layer_idx], max_tiles)
            described = [part.to(pool.k_pages.device) for part in (rows, tiles)]
            is_empty = is_empty.to(pool.k_pages.device)
        layers.append(
            TileUnits(
                k_pages=pool.k_pages,
                v_pages=pool.v_pages,
                page_ids=tables[layer_idx, rows, tiles].to(pool.k_pages.device),
                unit_rows=described[0],
                unit_tiles=described[1],
                last_units=last,
                is_empty=is_empty,
                num_rows=lens.shape[1],
                max_tiles=max_tiles,
            )
        )
    return layers


def _units(lens: Tensor, max_tiles: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return rows, tiles, last units and their empty places; `lens` is `[num_rows]`."""
    starts = torch.arange(max_tiles) * TILE_TOKENS
    rows, tiles = (starts[None, :] < lens[:, None]).nonzero(as_tuple=True)
    num_tiles = -(-lens // TILE_TOKENS)
    num_in_last = lens - (num_tiles - 1) * TILE_TOKENS
    is_empty = torch.arange(TILE_TOKENS)[None, :] >= num_in_last[:, None]
    return rows, tiles, num_tiles.cumsum(0) - 1, is_empty
