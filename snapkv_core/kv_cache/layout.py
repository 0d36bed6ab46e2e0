"""Sizes of the KV cache, in integers; imports no torch, so the scheduler can use it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of one model's KV cache and of its pages.

    A page belongs to one (layer, sequence, KV head) and holds `page_size` tokens' keys and values.

    Attributes:
        num_layers: Decoder layers.
        num_kv_heads: KV heads per layer; query heads share them and store nothing of their own.
        head_dim: Elements of one key or value.
        element_bytes: Bytes of one element.
        page_size: Tokens in a page.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    element_bytes: int
    page_size: int

    @property
    def entry_bytes(self) -> int:
        """Bytes of the key and the value of one token in one layer and KV head."""
        return 2 * self.head_dim * self.element_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers and KV heads."""
        return self.num_page_rows * self.entry_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, keys and values."""
        return self.page_size * self.entry_bytes

    @property
    def num_page_rows(self) -> int:
        """Page tables of one sequence: one for each layer and KV head."""
        return self.num_layers * self.num_kv_heads

    def pages_for(self, num_tokens: int) -> int:
        """Return the pages that hold `num_tokens` tokens of one layer and KV head."""
        return -(-num_tokens // self.page_size)

    def shared_pages(self, num_kept: int) -> int:
        """Return the pages, in all layers and KV heads, that only kept prompt tokens fill.

        They are never written again, so all choices of a request share them.
        """
        return self.num_page_rows * (num_kept // self.page_size)

    def tail_pages(self, num_kept: int, max_new_tokens: int) -> int:
        """Return the pages that one choice needs beyond the shared ones, at its longest."""
        longest = self.pages_for(num_kept + max_new_tokens)
        return self.num_page_rows * longest - self.shared_pages(num_kept)
