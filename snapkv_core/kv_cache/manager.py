"""Storage of every sequence's KV: reserve, write_layer, append, fork, free."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from snapkv_core.errors import KVCacheError
from snapkv_core.kv_cache.layout import KVLayout


@dataclass(frozen=True, slots=True)
class KVView:
    """Stored KV of one sequence in one layer.

    Attributes:
        keys: `[num_kv_heads, max_kv_len, head_dim]`, a view into the store.
        values: The same for values.
        kv_lens: Tokens stored per KV head, `[num_kv_heads]`, int64, on the CPU; a head shorter
            than `max_kv_len` has nothing to read beyond its length.
    """

    keys: Tensor
    values: Tensor
    kv_lens: Tensor


class _SequenceKV:
    """One extent per layer, `[num_kv_heads, longest kept prompt + max_new_tokens, head_dim]`."""

    def __init__(self, layout: KVLayout, max_new_tokens: int) -> None:
        self.max_new_tokens = max_new_tokens
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.prompt_lens = torch.zeros(layout.num_layers, layout.num_kv_heads, dtype=torch.int64)
        self.kv_lens = torch.zeros_like(self.prompt_lens)

    def tensors(self) -> Iterator[Tensor]:
        yield from self.keys
        yield from self.values


class KVCacheManager:
    """KV of all sequences; lengths may differ by layer and by KV head.

    Only the engine thread calls it. Invariant, see `check_integrity`: a sequence has an extent
    for each layer written so far, and no head of it is longer than its extent.
    """

    def __init__(self, layout: KVLayout, *, dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        self._dtype = dtype
        self._device = device
        self._sequences: dict[int, _SequenceKV] = {}
        self._heads = torch.arange(layout.num_kv_heads, device=device)

    def reserve(self, seq_id: int, *, max_new_tokens: int) -> None:
        """Open the books for a sequence that will append at most `max_new_tokens` tokens.

        Raises:
            KVCacheError: The sequence is known already.
        """
        if seq_id in self._sequences:
            raise KVCacheError(f"sequence {seq_id} has KV already")
        self._sequences[seq_id] = _SequenceKV(self.layout, max_new_tokens)

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
            keys: Keys of the whole prompt, `[num_kv_heads, prompt_len, head_dim]`.
            values: The same for values.
            kept_indices: Prompt tokens to keep, `[num_kv_heads, max_kept]`; None keeps all.
            kept_lens: Entries of each row of `kept_indices` that count, `[num_kv_heads]`, CPU.

        Raises:
            KVCacheError: Unknown sequence, or the layer is not the next one; nothing is stored.
        """
        sequence = self._get(seq_id)
        if layer_idx != len(sequence.keys):
            raise KVCacheError(f"layer {layer_idx} after {len(sequence.keys)} layers of {seq_id}")
        if kept_indices is None:
            num_kept = keys.shape[1]
            lens = torch.full((self.layout.num_kv_heads,), num_kept, dtype=torch.int64)
        else:
            assert kept_lens is not None, "kept_indices come with kept_lens"
            num_kept = kept_indices.shape[1]
            lens = kept_lens
        shape = (self.layout.num_kv_heads, num_kept + sequence.max_new_tokens, self.layout.head_dim)
        # Slots past a shorter head's length are read with weight zero: they must hold numbers,
        # since zero times an uninitialised NaN is NaN. Equal heads have no such slots.
        allocate = torch.empty if int(lens.min()) == int(lens.max()) else torch.zeros
        for full, extents in ((keys, sequence.keys), (values, sequence.values)):
            extent = allocate(shape, dtype=self._dtype, device=self._device)
            if kept_indices is None:
                extent[:, :num_kept] = full
            else:
                index = kept_indices.unsqueeze(-1).expand(-1, -1, self.layout.head_dim)
                torch.gather(full, 1, index, out=extent[:, :num_kept])
            extents.append(extent)
        sequence.prompt_lens[layer_idx] = lens
        sequence.kv_lens[layer_idx] = lens

    def append(self, seq_ids: Sequence[int], layer_idx: int, keys: Tensor, values: Tensor) -> None:
        """Store one new token of each sequence in one layer.

        Args:
            seq_ids: The sequences, one per row.
            layer_idx: The layer.
            keys: `[num_rows, num_kv_heads, head_dim]`; rows beyond `seq_ids` are padding.
            values: The same for values.

        Raises:
            KVCacheError: A sequence is unknown or has used up its `max_new_tokens`.
        """
        for row, seq_id in enumerate(seq_ids):
            sequence = self._get(seq_id)
            lens = sequence.kv_lens[layer_idx]
            if int(lens.max()) >= sequence.keys[layer_idx].shape[1]:
                raise KVCacheError(f"sequence {seq_id} has no room for another token")
            slots = (self._heads, lens.to(self._device))
            sequence.keys[layer_idx].index_put_(slots, keys[row])
            sequence.values[layer_idx].index_put_(slots, values[row])
            lens += 1

    def view(self, seq_id: int, layer_idx: int) -> KVView:
        """Return the stored KV of one sequence in one layer, without a copy."""
        sequence = self._get(seq_id)
        kv_lens = sequence.kv_lens[layer_idx]
        max_kv_len = int(kv_lens.max())
        return KVView(
            keys=sequence.keys[layer_idx][:, :max_kv_len],
            values=sequence.values[layer_idx][:, :max_kv_len],
            kv_lens=kv_lens,
        )

    def fork(self, parent_id: int, child_id: int) -> None:
        """Give a new sequence a copy of everything its parent has stored.

        Raises:
            KVCacheError: The parent is unknown or the child is known already.
        """
        parent = self._get(parent_id)
        self.reserve(child_id, max_new_tokens=parent.max_new_tokens)
        child = self._sequences[child_id]
        child.keys = [extent.clone() for extent in parent.keys]
        child.values = [extent.clone() for extent in parent.values]
        child.prompt_lens = parent.prompt_lens.clone()
        child.kv_lens = parent.kv_lens.clone()

    def free(self, seq_id: int) -> None:
        """Drop a sequence's KV; one that was never reserved is fine, so abort is idempotent."""
        self._sequences.pop(seq_id, None)

    def prompt_entries(self, seq_id: int) -> float:
        """Return the prompt tokens stored, mean over the layers and KV heads written so far."""
        sequence = self._get(seq_id)
        return float(sequence.prompt_lens[: len(sequence.keys)].double().mean())

    def prompt_bytes(self, seq_id: int) -> int:
        """Return the bytes of K and V stored for the prompt."""
        return int(self._get(seq_id).prompt_lens.sum()) * self.layout.entry_bytes

    def allocated_bytes(self, seq_id: int | None = None) -> int:
        """Return the bytes allocated to one sequence, or to all: prompt and room for the answer."""
        sequences = self._sequences.values() if seq_id is None else (self._get(seq_id),)
        return sum(tensor.nbytes for sequence in sequences for tensor in sequence.tensors())

    def check_integrity(self) -> None:
        """Check the class invariant.

        Raises:
            KVCacheError: It is broken; says where.
        """
        for seq_id, sequence in self._sequences.items():
            num_written = len(sequence.keys)
            if int(sequence.kv_lens[num_written:].sum()) != 0:
                raise KVCacheError(f"sequence {seq_id} has lengths for layers never written")
            for layer_idx, (keys, values) in enumerate(
                zip(sequence.keys, sequence.values, strict=True)
            ):
                longest = int(sequence.kv_lens[layer_idx].max())
                if keys.shape != values.shape or longest > keys.shape[1]:
                    raise KVCacheError(f"sequence {seq_id} overflows its extent, layer {layer_idx}")

    def _get(self, seq_id: int) -> _SequenceKV:
        try:
            return self._sequences[seq_id]
        except KeyError:
            raise KVCacheError(f"sequence {seq_id} has no KV") from None
