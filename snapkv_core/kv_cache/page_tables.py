"""Which pages hold which tokens: one table for each layer, sequence and KV head."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from snapkv_core.errors import KVCacheError
from snapkv_core.kv_cache.layout import KVLayout
from snapkv_core.kv_cache.page_pool import NULL_PAGE


class PageTables:
    """Page ids and lengths of all sequences, as tensors on the CPU.

    A sequence has a row (`seq_slot`) from its admission to its end. Only the engine thread uses
    it. Invariant: a table names `pages_for(kv_len)` pages and the null page from there on.

    Attributes:
        page_tables: `[num_layers, max_num_seqs, num_kv_heads, width]`, int32; the width grows with
            the longest sequence, so what compression saves is saved here as well.
        kv_lens: Tokens stored, `[num_layers, max_num_seqs, num_kv_heads]`, int32.
        prompt_lens: Kept prompt tokens among them; same shape.
    """

    def __init__(self, layout: KVLayout, *, max_num_seqs: int) -> None:
        rows = (layout.num_layers, max_num_seqs, layout.num_kv_heads)
        self.page_tables = torch.full((*rows, 1), NULL_PAGE, dtype=torch.int32)
        self.kv_lens = torch.zeros(rows, dtype=torch.int32)
        self.prompt_lens = torch.zeros(rows, dtype=torch.int32)
        self._layout = layout
        self._slots: dict[int, int] = {}
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._slots

    def add(self, seq_id: int) -> int:
        """Give a sequence a slot.

        Raises:
            KVCacheError: It has one already, or none is left.
        """
        if seq_id in self._slots:
            raise KVCacheError(f"sequence {seq_id} has KV already")
        if not self._free_slots:
            raise KVCacheError(f"no slot is left for sequence {seq_id}")
        self._slots[seq_id] = self._free_slots.pop()
        return self._slots[seq_id]

    def remove(self, seq_id: int) -> Tensor:
        """Take a sequence's slot away; returns the ids of all its pages, int32."""
        slot = self._slots.pop(seq_id)
        tables = self.page_tables[:, slot]
        page_ids = tables[tables != NULL_PAGE]
        tables.fill_(NULL_PAGE)
        self.kv_lens[:, slot] = 0
        self.prompt_lens[:, slot] = 0
        self._free_slots.append(slot)
        return page_ids

    def slot(self, seq_id: int) -> int:
        """Return the slot of a sequence; raises `KVCacheError` when it has none."""
        try:
            return self._slots[seq_id]
        except KeyError:
            raise KVCacheError(f"sequence {seq_id} has no KV") from None

    def slots(self, seq_ids: Sequence[int]) -> Tensor:
        """Return the slots of sequences, `[len(seq_ids)]`, int64."""
        return torch.tensor([self.slot(seq_id) for seq_id in seq_ids], dtype=torch.int64)

    def set_prompt(self, layer_idx: int, slot: int, lens: Tensor, page_ids: Tensor) -> Tensor:
        """Enter the pages of one layer's kept prompt.

        Args:
            layer_idx: The layer.
            slot: The sequence's slot.
            lens: Kept tokens per KV head, `[num_kv_heads]`.
            page_ids: Pages for them, head after head.

        Returns:
            Which places of `[num_kv_heads, max_pages]` the pages fill, bool.
        """
        num_pages = -(-lens // self._layout.page_size)
        self._widen(int(num_pages.max()))
        is_filled = torch.arange(int(num_pages.max()))[None, :] < num_pages[:, None]
        self.page_tables[layer_idx, slot, :, : is_filled.shape[1]].masked_scatter_(
            is_filled, page_ids
        )
        self.kv_lens[layer_idx, slot] = lens
        self.prompt_lens[layer_idx, slot] = lens
        return is_filled

    def of_slots(self, slots: Tensor) -> Tensor:
        """Return the tables of some slots, no wider than the longest of them needs.

        Other sequences, those that have ended included, may have made the tables wider by far.

        Returns:
            `[num_layers, len(slots), num_kv_heads, width]`, int32, a copy.
        """
        width = self._layout.pages_for(int(self.kv_lens[:, slots].max()))
        return self.page_tables[..., :width][:, slots]

    def starts_page(self, slots: Tensor) -> Tensor:
        """Tell which heads need a page for their next token.

        Returns:
            `[num_layers, len(slots), num_kv_heads]`, bool.
        """
        return self.kv_lens[:, slots] % self._layout.page_size == 0

    def extend(self, slots: Tensor, starts_page: Tensor, page_ids: Tensor) -> Tensor:
        """Make room for one token in every layer and head of some sequences.

        Args:
            slots: The sequences, `[num_rows]`, int64.
            starts_page: Output of `starts_page` for them.
            page_ids: A page for each True of it, int32.

        Returns:
            Where the token goes in the pool, `page_id * page_size + offset`,
            `[num_layers, num_rows, num_kv_heads]`, int64.
        """
        lens = self.kv_lens[:, slots]
        page_size = self._layout.page_size
        self._widen(int(lens.max()) // page_size + 1)
        if len(page_ids):
            layers, rows, heads = starts_page.nonzero(as_tuple=True)
            at = lens[layers, rows, heads].long() // page_size
            self.page_tables[layers, slots[rows], heads, at] = page_ids
        at = (lens.long() // page_size).unsqueeze(-1)
        self.kv_lens[:, slots] = lens + 1
        pages = self.of_slots(slots).gather(-1, at).squeeze(-1)
        return pages.long() * page_size + lens % page_size

    def pages(self, slot: int) -> tuple[Tensor, Tensor]:
        """Return the pages of a slot, in table order.

        Returns:
            The ids of full pages, which may be shared, and those of pages that are still written
            to, which must be copied; int32.
        """
        tables, is_open = self.page_tables[:, slot], self._open_places(slot)
        return tables[(tables != NULL_PAGE) & ~is_open], tables[is_open]

    def copy(self, parent: int, child: int, page_ids: Tensor) -> None:
        """Give one slot the pages of another.

        Args:
            parent: The other.
            child: The slot, which has none.
            page_ids: What takes the place of pages that are still written to, in table order.
        """
        self.page_tables[:, child] = self.page_tables[:, parent]
        self.kv_lens[:, child] = self.kv_lens[:, parent]
        self.prompt_lens[:, child] = self.prompt_lens[:, parent]
        self.page_tables[:, child].masked_scatter_(self._open_places(child), page_ids)

    def num_pages(self, slot: int) -> int:
        """Return how many pages a slot names."""
        return int((self.page_tables[:, slot] != NULL_PAGE).sum())

    def _open_places(self, slot: int) -> Tensor:
        """Return where the pages that are partly filled stand, `[num_layers, heads, width]`."""
        page_size = self._layout.page_size
        num_full = (self.kv_lens[:, slot] // page_size).unsqueeze(-1)
        is_partial = (self.kv_lens[:, slot] % page_size != 0).unsqueeze(-1)
        return (torch.arange(self.page_tables.shape[-1]) == num_full) & is_partial

    def _widen(self, num_pages: int) -> None:
        width = self.page_tables.shape[-1]
        if num_pages > width:
            wider = max(num_pages, 2 * width) - width
            self.page_tables = F.pad(self.page_tables, (0, wider), value=NULL_PAGE)

    def check_integrity(self) -> Tensor:
        """Check the class invariant.

        Returns:
            How often each page is named, up to the largest id named.

        Raises:
            KVCacheError: It is broken; says where.
        """
        is_named = self.page_tables != NULL_PAGE
        num_named = is_named.sum(-1, keepdim=True)
        if not torch.equal(num_named[..., 0], -(-self.kv_lens // self._layout.page_size).long()):
            raise KVCacheError("a page table does not name as many pages as its length needs")
        if not torch.equal(is_named, torch.arange(is_named.shape[-1]) < num_named):
            raise KVCacheError("a page table has a gap")
        used = torch.zeros(self.kv_lens.shape[1], dtype=torch.bool)
        used[list(self._slots.values())] = True
        if bool(self.kv_lens[:, ~used].any()):
            raise KVCacheError("a slot without a sequence has a length")
        return torch.bincount(self.page_tables[is_named])
