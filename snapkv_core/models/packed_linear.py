"""Products with weights on a CPU: laid out once for oneDNN, and the same for any number of rows.

PyTorch's own `linear` lays a weight out anew in each call and rounds otherwise for one row than for
many; with packed weights a decode step costs about half, and a sequence's numbers do not depend on
its neighbours (ADR 0009).
"""

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: Numbers of rows between which kernels are known to switch.
_PROBE_ROWS: Final = (1, 2, 3, 5, 8, 13, 31)


class PackedLinear(nn.Module):
    """A linear layer whose weight only oneDNN can read.

    Attributes:
        product_dtype: Number format the product is computed in; input and output keep theirs.
    """

    def __init__(self, linear: nn.Linear, product_dtype: torch.dtype) -> None:
        """Pack the weight of `linear`, which is left as it is."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.product_dtype = product_dtype
        weight = linear.weight.detach().to(product_dtype)
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        bias: Tensor | None = linear.bias
        self._bias = None if bias is None else bias.detach().to(product_dtype)

    def forward(self, rows: Tensor) -> Tensor:
        """Multiply `[..., in_features]` to `[..., out_features]`."""
        flat = rows.reshape(-1, self.in_features).to(self.product_dtype)
        num_rows = len(flat)
        missing = padded_rows(num_rows) - num_rows
        if missing:
            flat = F.pad(flat, (0, 0, 0, missing))
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            flat, self._packed, self._bias, "none", [], ""
        )
        return product[:num_rows].view(*rows.shape[:-1], self.out_features).to(rows.dtype)


def padded_rows(num_rows: int) -> int:
    """Return the number of rows that a product is computed with.

    oneDNN compiles code for each number of rows it meets, about half a megabyte for a weight that
    is never freed for long: prompts of every length would fill the memory. So there are four
    numbers between a power of two and the next.
    """
    step = 1 << max(0, num_rows.bit_length() - 3)
    return -(-num_rows // step) * step


def pack_linears(model: nn.Module, product_dtype: torch.dtype) -> int:
    """Swap the plain linear layers of a model on the CPU for packed ones.

    Quantised layers are left alone: they, or their weights, are of other types.

    Returns:
        How many were swapped; 0 where this PyTorch cannot pack, or packs without making rows
        independent of each other.
    """
    if not _can_pack(product_dtype):
        return 0
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
        and type(child.weight) is nn.Parameter
        and child.weight.device.type == "cpu"
    ]
    for parent, name, child in found:
        setattr(parent, name, PackedLinear(child, product_dtype))
    return len(found)


@torch.inference_mode()
def _can_pack(product_dtype: torch.dtype) -> bool:
    """Pack one layer and compare each number of rows with the same rows among more."""
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(320, 192)
    linear.weight.copy_(torch.randn(192, 320, generator=generator))
    rows = torch.randn(40, 320, generator=generator).to(product_dtype)
    try:
        packed: Any = PackedLinear(linear, product_dtype)
        together = packed(rows)
        plain = nn.functional.linear(
            rows, linear.weight.to(product_dtype), linear.bias.to(product_dtype)
        )
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    is_right = torch.allclose(together, plain, rtol=1e-2, atol=1e-2)
    return is_right and all(torch.equal(packed(rows[:num]), together[:num]) for num in _PROBE_ROWS)
