"""The tensors of a snapshot as safetensors documents: one for the prompt, then one per layer.

Not one for all: the library copies a document while it holds the interpreter's lock, and the
engine's thread would wait for all layers at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import safetensors.torch
import torch
from torch import Tensor

from snapkv_core.errors import SnapshotError
from snapkv_core.kv_cache.quantised import dequantise, quantise
from snapkv_core.kv_cache.snapshot import SnapshotBody, require_tensor

#: Prompts of at most so many tokens have positions that two bytes hold.
_MAX_UINT16_TOKENS: Final = 65_536

#: Dtype and shape of a tensor.
_Kind = tuple[torch.dtype, tuple[int, ...]]


def write_prompt(last_hidden: Tensor) -> bytes:
    """Return the document of what belongs to no layer."""
    return _save({"last_hidden": last_hidden})


def read_prompt(document: bytes, dtype: torch.dtype, hidden_size: int) -> Tensor:
    """Return `last_hidden`, `[hidden_size]`.

    Raises:
        SnapshotError: The document is not `write_prompt`'s, or of another dtype or shape.
    """
    tensors = _load("prompt", document, {"last_hidden": (dtype, (hidden_size,))})
    return tensors["last_hidden"]


@dataclass(frozen=True, slots=True)
class LayerFormat:
    """How the layers of one snapshot are written.

    Attributes:
        body: How keys and values are held.
        dtype: Of keys and values outside the snapshot.
        head_dim: Elements of one key or value.
        index_dtype: Of kept positions in the document; None when there are none.
    """

    body: SnapshotBody
    dtype: torch.dtype
    head_dim: int
    index_dtype: torch.dtype | None

    def write(
        self,
        layer_idx: int,
        lens: Sequence[int],
        keys: Tensor,
        values: Tensor,
        kept_indices: Tensor | None,
    ) -> bytes:
        """Return the document of one layer.

        Args:
            layer_idx: The layer, for errors.
            lens: Entries of each KV head.
            keys: `[num_entries, head_dim]`, CPU.
            values: The same for values.
            kept_indices: `[num_entries]`, or None when the format has none.

        Raises:
            SnapshotError: The body is `int8` and a number is not finite.
        """
        tensors: dict[str, Tensor] = {}
        for name, exact in (("keys", keys), ("values", values)):
            if self.body == "exact":
                tensors[name] = exact
            else:
                label = f"{name} of layer {layer_idx}"
                tensors[name], tensors[f"{name}_scales"] = quantise(label, exact, lens)
        if kept_indices is not None:
            assert self.index_dtype is not None, "positions have a dtype"
            tensors["kept_indices"] = kept_indices.to(self.index_dtype)
        return _save(tensors)

    def read(
        self, layer_idx: int, lens: Sequence[int], document: bytes
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return keys, values and kept positions as `write` was given them.

        Raises:
            SnapshotError: The document is not `write`'s for these lengths; names what differs.
        """
        tensors = _load(f"layer {layer_idx}", document, self._kinds(lens))
        if self.body == "int8":
            for name in ("keys", "values"):
                codes, scales = tensors[name], tensors[f"{name}_scales"]
                tensors[name] = dequantise(codes, scales, lens, self.dtype)
        kept = tensors.get("kept_indices")
        return tensors["keys"], tensors["values"], None if kept is None else kept.to(torch.int32)

    def _kinds(self, lens: Sequence[int]) -> dict[str, _Kind]:
        """Return what a layer's document holds."""
        num_entries = sum(lens)
        entries = (num_entries, self.head_dim)
        kinds: dict[str, _Kind] = {}
        for name in ("keys", "values"):
            if self.body == "exact":
                kinds[name] = (self.dtype, entries)
            else:
                kinds[name] = (torch.int8, entries)
                kinds[f"{name}_scales"] = (torch.float32, (len(lens), self.head_dim))
        if self.index_dtype is not None:
            kinds["kept_indices"] = (self.index_dtype, (num_entries,))
        return kinds


def index_dtype_for(num_prompt_tokens: int) -> torch.dtype:
    """Return the smallest dtype that holds every position of a prompt of so many tokens."""
    return torch.uint16 if num_prompt_tokens <= _MAX_UINT16_TOKENS else torch.int32


def _save(tensors: Mapping[str, Tensor]) -> bytes:
    # The library refuses tensors with gaps.
    return safetensors.torch.save({name: part.contiguous() for name, part in tensors.items()})


def _load(what: str, document: bytes, kinds: Mapping[str, _Kind]) -> dict[str, Tensor]:
    """Read a document that must hold exactly these tensors."""
    try:
        tensors = safetensors.torch.load(document)
    except Exception as error:  # whatever bytes of others can make a library raise
        reason = f"{type(error).__name__} {error!s:.80}"
        raise SnapshotError(f"{what}: not a safetensors document: {reason}") from error
    if tensors.keys() != kinds.keys():
        raise SnapshotError(f"{what}: its tensors are not {', '.join(sorted(kinds))}")
    for name, (dtype, shape) in kinds.items():
        require_tensor(f"{what}, {name}", tensors[name], dtype, shape)
    return tensors
