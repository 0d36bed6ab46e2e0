"""The engine's attention in the registry of transformers, whose layers call it by its name.

Importing this imports the half of transformers that models are made of, which takes as long as
PyTorch itself. So it is imported when there is a model, not by every command and test server.
"""

from typing import Any, Final

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from snapkv_core.errors import ModelLoadError
from snapkv_core.models.decoder import AttentionContext

ATTENTION_NAME: Final = "snapkv"


def _attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    snapkv_context: AttentionContext | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers' layers call it; without a context it is plain SDPA."""
    if snapkv_context is None:
        if sliding_window is not None:
            kwargs["sliding_window"] = sliding_window
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output, None
    unknown = sorted(name for name, given in kwargs.items() if given not in (None, False))
    if unknown:
        raise ModelLoadError(
            f"{type(module).__name__} asks its attention for {', '.join(unknown)}, "
            "which this engine does not compute"
        )
    if sliding_window is not None and snapkv_context.num_positions > sliding_window:
        raise ModelLoadError(
            f"sliding window of {sliding_window} over {snapkv_context.num_positions} positions"
        )
    scale = scaling if scaling is not None else float(query.shape[-1]) ** -0.5
    layer_idx = int(module.layer_idx)  # type: ignore[arg-type]  # every HF attention has one
    output = snapkv_context.attend(layer_idx, query, key, value, scaling=scale)
    return output.transpose(1, 2), None


AttentionInterface.register(ATTENTION_NAME, _attention_forward)
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
