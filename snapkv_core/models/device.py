"""Choice of device and dtype from configuration and, on a CPU, from a measurement."""

import time
from typing import Final

import torch

from snapkv_core.errors import ModelLoadError

_DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
#: bfloat16 must be clearly faster, or noise would change a replica's answers from start to start.
_MIN_BFLOAT16_GAIN: Final = 1.3


def choose_device(name: str) -> torch.device:
    """Resolve `auto`, `cpu`, `cuda` or `cuda:N`.

    Raises:
        ModelLoadError: Not a device, or not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ModelLoadError(f"device {name!r}: use auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ModelLoadError(f"device {name!r} is not supported: use auto, cpu, cuda or cuda:N")
    if device.type == "cuda":
        num_gpus = torch.cuda.device_count()
        if (device.index or 0) >= num_gpus:
            raise ModelLoadError(f"device {name!r}: PyTorch sees {num_gpus} GPUs on this machine")
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Resolve a dtype; `auto` is bfloat16 on a GPU and the faster of two on a CPU."""
    if name != "auto":
        return _DTYPES[name]
    if device.type == "cuda":
        return torch.bfloat16
    return torch.bfloat16 if _has_fast_bfloat16() else torch.float32


def choose_product_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the number format in which a CPU multiplies weights of `dtype`.

    A CPU without instructions for a short format computes it several times slower than float32,
    which loses nothing but the memory of wider weights.
    """
    if dtype is torch.bfloat16 and _has_fast_bfloat16():
        return torch.bfloat16
    return torch.float32


def _has_fast_bfloat16() -> bool:
    gain = _product_time_s(torch.float32) / _product_time_s(torch.bfloat16)
    return gain >= _MIN_BFLOAT16_GAIN


@torch.inference_mode()
def _product_time_s(dtype: torch.dtype) -> float:
    """Time a product of a prefill chunk's shape, best of three after one to warm up."""
    activations = torch.full((128, 1024), 0.5, dtype=dtype)
    weight = torch.full((1024, 1024), 0.5, dtype=dtype)
    times = []
    for _ in range(4):
        start = time.perf_counter()
        torch.nn.functional.linear(activations, weight)
        times.append(time.perf_counter() - start)
    return min(times[1:])
