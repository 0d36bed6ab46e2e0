"""Which backend a name means on a device."""

import torch

from snapkv_core.attention.base import AttentionBackend
from snapkv_core.attention.flash import FlashBackend, load_flash_function
from snapkv_core.attention.matmul import MatmulBackend
from snapkv_core.attention.sdpa import SdpaBackend
from snapkv_core.errors import InvalidParameterError


def choose_backend(name: str, device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    """Build a backend.

    Args:
        name: `sdpa`, `matmul`, `flash`, or `auto`, which takes flash where it can run.
        device: Where the model is.
        dtype: Its number format.

    Raises:
        InvalidParameterError: `flash` was asked for and cannot run here.
    """
    if name == "matmul":
        return MatmulBackend()
    if name in ("auto", "flash"):
        flash_attn_func = load_flash_function(device, dtype)
        if flash_attn_func is not None:
            return FlashBackend(flash_attn_func)
        if name == "flash":
            raise InvalidParameterError(
                "attention_backend",
                f"flash needs a CUDA device, a 16-bit number format and the extra `gpu`; this is "
                f"{device.type} with {str(dtype).removeprefix('torch.')}",
            )
    return SdpaBackend()
