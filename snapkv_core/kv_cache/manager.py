"""Storage of every sequence's KV: reserve, write_layer, begin_step, append, fork, free."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from snapkv_core.errors import KVCacheError
from snapkv_core.kv_cache.layout import KVLayout
from snapkv_core.kv_cache.page_pool import PagePool
from snapkv_core.kv_cache.page_tables import PageTables
from snapkv_core.kv_cache.step_view import TileUnits, cut_into_tiles


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """Where one decode step writes and what it reads.

    Attributes:
        slot_mapping: Places of the new tokens in the pool, `[num_layers, num_seqs * num_kv_heads]`.
        layers: What attention reads, one entry per layer.
    """

    slot_mapping: Tensor
    layers: tuple[TileUnits, ...]


class KVCacheManager:
    """KV of all sequences, in pages; lengths may differ by layer and by KV head.

    Pages are taken when tokens need them, so a sequence holds what it has stored and at most one
    page more per layer and head; that they are there when needed is the business of admission.
    Only the engine thread uses it.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        num_pages: int,
        max_num_seqs: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layout = layout
        self._pool = PagePool(layout, num_pages=num_pages, dtype=dtype, device=device)
        self._tables = PageTables(layout, max_num_seqs=max_num_seqs)
        self._num_written: dict[int, int] = {}

    @property
    def num_pages_used(self) -> int:
        """Pages that hold KV, a page that several choices share counted once."""
        return self._pool.num_used

    @property
    def num_pages_total(self) -> int:
        """Pages of the pool."""
        return self._pool.num_pages

    def reserve(self, seq_id: int) -> None:
        """Open the books for a sequence.

        Raises:
            KVCacheError: The sequence is known already, or as many are as may be.
        """
        self._tables.add(seq_id)
        self._num_written[seq_id] = 0

    def write_layer(
        self,
        seq_id: int,
        layer_idx: int,
        keys: Tensor,
        values: Tensor,
        *,
        kept_indices: Tensor | None = None,
        kept_lens: Tensor | None = None,
    ) -> None:
        """Store what a layer keeps of a prompt; layers are written in order, once each.

        Args:
            seq_id: A reserved sequence.
            layer_idx: The next layer of it.
            keys: Keys of the whole prompt, `[num_kv_heads, prompt_len, head_dim]`; converted to
                the pool's number format.
            values: The same for values.
            kept_indices: Prompt tokens to keep, `[num_kv_heads, max_kept]`; None keeps all.
            kept_lens: Entries of each row of `kept_indices` that count, `[num_kv_heads]`, CPU.

        Raises:
            KVCacheError: Unknown sequence, the layer is not the next one, or no page is free.
        """
        slot = self._tables.slot(seq_id)
        if layer_idx != self._num_written[seq_id]:
            raise KVCacheError(
                f"layer {layer_idx} after {self._num_written[seq_id]} layers of {seq_id}"
            )
        num_kv_heads, page_size = self.layout.num_kv_heads, self.layout.page_size
        if kept_indices is None:
            lens = torch.full((num_kv_heads,), keys.shape[1], dtype=torch.int32)
        else:
            assert kept_lens is not None, "kept_indices come with kept_lens"
            lens = kept_lens.to(torch.int32)
        page_ids = self._pool.take(int((-(-lens // page_size)).sum()))
        is_filled = self._tables.set_prompt(layer_idx, slot, lens, page_ids)
        self._num_written[seq_id] += 1
        for full, pages in ((keys, self._pool.k_pages), (values, self._pool.v_pages)):
            kept = _gather(full, kept_indices, lens, is_filled.shape[1] * page_size)
            chosen = kept.view(num_kv_heads, -1, page_size, self.layout.head_dim)
            pages[page_ids.to(pages.device)] = chosen[is_filled.to(pages.device)].to(pages.dtype)

    def restore_layer(
        self, seq_id: int, layer_idx: int, keys: Tensor, values: Tensor, lens: Tensor
    ) -> None:
        """Store a layer of a prompt that was read before; see `write_layer`.

        Args:
            seq_id: A reserved sequence.
            layer_idx: The next layer of it.
            keys: `[sum of lens, head_dim]`, the entries of one head after those of another.
            values: The same for values.
            lens: Entries of each KV head, `[num_kv_heads]`, CPU.

        Raises:
            KVCacheError: Unknown sequence, the layer is not the next one, or no page is free.
        """
        longest = int(lens.max())
        is_entry = torch.arange(longest) < lens[:, None]
        rows = []
        for entries in (keys, values):
            row = entries.new_zeros(len(lens), longest, self.layout.head_dim)
            row[is_entry] = entries
            rows.append(row.to(self._pool.k_pages.device))
        places = torch.arange(longest, device=rows[0].device).expand(len(lens), -1)
        self.write_layer(seq_id, layer_idx, rows[0], rows[1], kept_indices=places, kept_lens=lens)

    def begin_step(self, seq_ids: Sequence[int]) -> DecodeStep:
        """Make room for one new token of each sequence in all layers and heads at once.

        Raises:
            KVCacheError: A sequence is unknown or not written to its end, or no page is free.
        """
        slots = self._tables.slots(seq_ids)
        if any(self._num_written[seq_id] != self.layout.num_layers for seq_id in seq_ids):
            raise KVCacheError("a sequence of this step has layers that were not written")
        starts_page = self._tables.starts_page(slots)
        page_ids = self._pool.take(int(starts_page.sum()))
        slot_mapping = self._tables.extend(slots, starts_page, page_ids)
        return DecodeStep(
            slot_mapping.flatten(1).to(self._pool.k_pages.device),
            tuple(
                cut_into_tiles(
                    self._pool,
                    self._tables.of_slots(slots),
                    self._tables.kv_lens[:, slots],
                    self.layout.page_size,
                )
            ),
        )

    def append(self, step: DecodeStep, layer_idx: int, keys: Tensor, values: Tensor) -> None:
        """Store one new token of each sequence of a step in one layer.

        Args:
            step: From `begin_step`.
            layer_idx: The layer.
            keys: `[num_rows, num_kv_heads, head_dim]`; rows beyond the step's are padding.
            values: The same for values.
        """
        places = step.slot_mapping[layer_idx]
        for new, pages in ((keys, self._pool.k_pages), (values, self._pool.v_pages)):
            entries = new.reshape(-1, self.layout.head_dim)[: len(places)]
            pages.view(-1, self.layout.head_dim).index_copy_(0, places, entries)

    def fork(self, parent_id: int, child_id: int) -> None:
        """Let a new sequence go on from where its parent is; full pages are shared, not copied.

        Raises:
            KVCacheError: The parent is unknown, the child is known already, or no slot or page is
                free; nothing has changed.
        """
        parent = self._tables.slot(parent_id)
        shared, still_open = self._tables.pages(parent)
        self.reserve(child_id)
        try:
            copies = self._pool.copy(still_open)
        except KVCacheError:
            self.free(child_id)
            raise
        self._pool.share(shared)
        self._tables.copy(parent, self._tables.slot(child_id), copies)
        self._num_written[child_id] = self._num_written[parent_id]

    def free(self, seq_id: int) -> None:
        """Drop a sequence's KV; one that was never reserved is fine, so abort is idempotent."""
        if seq_id in self._tables:
            self._pool.give_back(self._tables.remove(seq_id))
            del self._num_written[seq_id]

    def stored(self, seq_id: int, layer_idx: int) -> list[tuple[Tensor, Tensor]]:
        """Return copies of a layer's keys and values, `[kv_len, head_dim]` for each KV head."""
        slot = self._tables.slot(seq_id)
        copies = []
        for table, kv_len in zip(
            self._tables.page_tables[layer_idx, slot],
            self._tables.kv_lens[layer_idx, slot].tolist(),
            strict=True,
        ):
            page_ids = table[: self.layout.pages_for(kv_len)].to(self._pool.k_pages.device)
            keys, values = self._pool.k_pages[page_ids], self._pool.v_pages[page_ids]
            copies.append((keys.flatten(0, 1)[:kv_len], values.flatten(0, 1)[:kv_len]))
        return copies

    def prompt_lens(self, seq_id: int) -> Tensor:
        """Return the prompt tokens stored, `[num_layers, num_kv_heads]`, int32, a copy."""
        return self._tables.prompt_lens[:, self._tables.slot(seq_id)].clone()

    def prompt_entries(self, seq_id: int) -> float:
        """Return the prompt tokens stored, mean over layers and KV heads."""
        return float(self._tables.prompt_lens[:, self._tables.slot(seq_id)].double().mean())

    def prompt_bytes(self, seq_id: int) -> int:
        """Return the bytes of K and V stored for the prompt."""
        num_entries = int(self._tables.prompt_lens[:, self._tables.slot(seq_id)].sum())
        return num_entries * self.layout.entry_bytes

    def held_bytes(self, seq_id: int) -> int:
        """Return the bytes of the pages that a sequence names, shared ones included."""
        return self._tables.num_pages(self._tables.slot(seq_id)) * self.layout.page_bytes

    def check_integrity(self) -> None:
        """Check the invariants of tables and pool against each other.

        Raises:
            KVCacheError: One is broken; says where.
        """
        named = self._tables.check_integrity()
        expected = torch.zeros(1 + self._pool.num_pages, dtype=torch.int32)
        expected[: len(named)] = named.to(torch.int32)
        self._pool.check_integrity(expected)


def _gather(full: Tensor, indices: Tensor | None, lens: Tensor, num_places: int) -> Tensor:
    """Return kept entries `[num_kv_heads, num_places, head_dim]`, zeros beyond each head's length.

    Zeros matter: places beyond a length are read with weight zero, and must hold numbers.
    """
    num_kv_heads, _, head_dim = full.shape
    kept = full.new_zeros(num_kv_heads, num_places, head_dim)
    if indices is None:
        kept[:, : full.shape[1]] = full
        return kept
    index = indices.unsqueeze(-1).expand(-1, -1, head_dim)
    kept[:, : indices.shape[1]] = full.gather(1, index)
    if int(lens.min()) < indices.shape[1]:
        is_beyond = torch.arange(num_places) >= lens[:, None]
        kept.masked_fill_(is_beyond.to(full.device).unsqueeze(-1), 0)
    return kept
