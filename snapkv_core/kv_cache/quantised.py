"""Keys or values of one layer in 8 bits, with a scale for each KV head and channel.

Some channels of keys are several times larger than the rest. One scale per head would be set by
those and leave the others a few of the 8 bits.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from snapkv_core.errors import SnapshotError

_MAX_CODE: Final = 127  # symmetric: -128 is not used


def quantise(name: str, entries: Tensor, lens: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Round each channel of each KV head to multiples of 1/127 of its largest magnitude.

    Args:
        name: What the entries are, for the error.
        entries: KV heads one after another, `[num_entries, head_dim]`.
        lens: Entries of each head; their sum is `num_entries`.

    Returns:
        Codes `[num_entries, head_dim]`, int8, and scales `[num_kv_heads, head_dim]`, float32:
        an entry is about its code times its head's scale.

    Raises:
        SnapshotError: An entry is not finite, so no scale fits.
    """
    codes, scales = [], []
    for head in torch.split(entries, list(lens)):
        exact = head.float()
        scale = exact.abs().amax(dim=0) / _MAX_CODE
        if not scale.isfinite().all():
            raise SnapshotError(f"{name}: cannot be held in 8 bits, a number is not finite")
        scale = scale.masked_fill(scale == 0, 1.0)  # of a channel of zeros: any will do
        codes.append((exact / scale).round_().clamp_(-_MAX_CODE, _MAX_CODE).to(torch.int8))
        scales.append(scale)
    return torch.cat(codes), torch.stack(scales)


def dequantise(codes: Tensor, scales: Tensor, lens: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return what `quantise` was given, within half a scale and one rounding to `dtype`."""
    entries = torch.empty(codes.shape, dtype=dtype)
    # By heads, for in float32 a layer is larger than what is returned of it.
    sizes = list(lens)
    for codes_of_head, scale, head in zip(
        torch.split(codes, sizes), scales, torch.split(entries, sizes), strict=True
    ):
        head.copy_(codes_of_head * scale)
    return entries
