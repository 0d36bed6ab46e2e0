"""Prefill on the flash-attn package (extra `gpu`), decode on batched matrix products."""

import importlib
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from snapkv_core.attention.tiled_decode import TiledDecodeBackend

FlashFunction = Callable[..., Tensor]


class FlashBackend(TiledDecodeBackend):
    """For CUDA and 16-bit formats; `flash_attn_func` handles grouped heads and chunks itself.

    Its causal mask is aligned to the bottom right, so the last query of a chunk sees all keys
    (flash-attn 2.1 and newer).
    """

    name: Final = "flash"
    grid_tokens: Final = 256

    def __init__(self, flash_attn_func: FlashFunction) -> None:
        """Take the package's function, which `load_flash_function` finds."""
        self._flash_attn_func = flash_attn_func
        super().__init__()

    def prefill(self, query: Tensor, keys: Tensor, values: Tensor, *, scaling: float) -> Tensor:
        """See `AttentionBackend.prefill`; on a GPU the cut of a prompt may change rounding."""
        # [heads, len, head_dim] here, [batch, len, heads, head_dim] there.
        output = self._flash_attn_func(
            query.transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            softmax_scale=scaling,
            causal=True,
        )
        return output[0].transpose(0, 1)


def load_flash_function(device: torch.device, dtype: torch.dtype) -> FlashFunction | None:
    """Return `flash_attn_func` where it can run, else None."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return None
    try:
        flash_attn: Any = importlib.import_module("flash_attn")
    except ImportError:
        return None
    function: FlashFunction = flash_attn.flash_attn_func
    return function
