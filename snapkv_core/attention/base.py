"""The seam behind which attention kernels may be exchanged."""

from typing import Protocol

from torch import Tensor


class PagedKV(Protocol):
    """Stored KV of a decode batch in one layer, as a backend reads it.

    A row is a (sequence, KV head), a unit one tile of a row's tokens; units are listed row after
    row, so that rows of different length waste nothing.

    Attributes:
        k_pages: Keys of the whole pool, `[num_pages, page_size, head_dim]`.
        v_pages: Values of the whole pool.
        page_ids: Pages of each unit, `[num_units, pages_per_tile]`, int32.
        unit_rows: Row that a unit belongs to, `[num_units]`, int64.
        unit_bias: What to add to a unit's logits: minus infinity at places that hold no token
            (zeros are stored there), else zero, `[num_units, 1, tile_tokens]`, float32.
        row_units: Units of each row in their order, `[num_rows, width]`, int64. The width is a
            power of two; a row without so many repeats its last.
        row_bias: Minus infinity for such repeats, else zero, `[num_rows, width, 1]`, float32.
    """

    @property
    def k_pages(self) -> Tensor: ...  # noqa: D102  # described above

    @property
    def v_pages(self) -> Tensor: ...  # noqa: D102

    @property
    def page_ids(self) -> Tensor: ...  # noqa: D102

    @property
    def unit_rows(self) -> Tensor: ...  # noqa: D102

    @property
    def unit_bias(self) -> Tensor: ...  # noqa: D102

    @property
    def row_units(self) -> Tensor: ...  # noqa: D102

    @property
    def row_bias(self) -> Tensor: ...  # noqa: D102


class AttentionBackend(Protocol):
    """Computes attention for both phases.

    Attributes:
        name: What start-up logs call it.
    """

    @property
    def name(self) -> str: ...  # noqa: D102  # described above

    def prefill(self, query: Tensor, keys: Tensor, values: Tensor, *, scaling: float) -> Tensor:
        """Attend from the last tokens of a prompt so far to all of it, causally.

        Args:
            query: `[num_q_heads, chunk_len, head_dim]`; its last token is the last of `keys`.
            keys: `[num_kv_heads, chunk_end, head_dim]`.
            values: The same for values.
            scaling: Factor on the logits.

        Returns:
            `[num_q_heads, chunk_len, head_dim]`, in `query`'s number format. How the caller cuts
            a prompt into chunks changes no bit on a CPU as long as cuts lie on `grid_tokens`.
        """

    @property
    def grid_tokens(self) -> int:
        """Grid of token positions on which a prompt may be cut without changing any bit."""

    def decode(self, query: Tensor, stored: PagedKV, *, scaling: float) -> Tensor:
        """Attend from one new token per sequence to that sequence's stored KV.

        Args:
            query: `[num_seqs, num_q_heads, head_dim]`.
            stored: KV of the sequences, the new token's included.
            scaling: Factor on the logits.

        Returns:
            `[num_seqs, num_q_heads, head_dim]`, in `query`'s number format. On a CPU a sequence's
            numbers do not depend on its neighbours or on the page size.
        """
