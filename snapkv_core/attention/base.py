"""The seam behind which attention kernels may be exchanged."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class StoredKV(Protocol):
    """Stored KV of one sequence in one layer, as a backend reads it.

    Attributes:
        keys: `[num_kv_heads, max_kv_len, head_dim]`.
        values: The same for values.
        kv_lens: Tokens stored per KV head, `[num_kv_heads]`, int64, on the CPU.
    """

    @property
    def keys(self) -> Tensor: ...  # noqa: D102  # described above

    @property
    def values(self) -> Tensor: ...  # noqa: D102

    @property
    def kv_lens(self) -> Tensor: ...  # noqa: D102


class AttentionBackend(Protocol):
    """Computes attention for both phases."""

    def prefill(self, query: Tensor, keys: Tensor, values: Tensor, *, scaling: float) -> Tensor:
        """Attend from the last tokens of a prompt so far to all of it, causally.

        Args:
            query: `[num_q_heads, chunk_len, head_dim]`; its last token is the last of `keys`.
            keys: `[num_kv_heads, chunk_end, head_dim]`.
            values: The same for values.
            scaling: Factor on the logits.

        Returns:
            `[num_q_heads, chunk_len, head_dim]`.
        """

    def decode(self, query: Tensor, stored: Sequence[StoredKV], *, scaling: float) -> Tensor:
        """Attend from one new token per sequence to that sequence's stored KV.

        Args:
            query: `[num_rows, num_q_heads, head_dim]`; rows beyond `stored` are padding.
            stored: KV of each sequence, the new token's included.
            scaling: Factor on the logits.

        Returns:
            `[num_rows, num_q_heads, head_dim]`, zero in padded rows.
        """
