"""Sizes of the KV cache, in integers; imports no torch, so the scheduler can use it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of one model's KV cache.

    Attributes:
        num_layers: Decoder layers.
        num_kv_heads: KV heads per layer; query heads share them and store nothing of their own.
        head_dim: Elements of one key or value.
        element_bytes: Bytes of one element.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    element_bytes: int

    @property
    def entry_bytes(self) -> int:
        """Bytes of the key and the value of one token in one layer and KV head."""
        return 2 * self.head_dim * self.element_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers and KV heads."""
        return self.num_layers * self.num_kv_heads * self.entry_bytes
