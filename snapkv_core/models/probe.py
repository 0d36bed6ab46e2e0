"""Proof at load that running the layers one by one gives the model's own logits.

Some families scale embeddings or logits outside their layers; without this proof they would
answer fluently and wrongly.
"""

from typing import Any, Final

import torch
from torch import Tensor

from snapkv_core.errors import ModelLoadError
from snapkv_core.models.decoder import LayeredDecoder

_PROBE_TOKENS: Final = 24
#: Largest share of the logits' spread that rounding may explain.
_TOLERANCE: Final = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}


class _ProbeContext:
    """Plain causal attention over what each layer has stored, written out."""

    def __init__(self) -> None:
        self._stored: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def num_positions(self) -> int:
        return _PROBE_TOKENS

    def attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float
    ) -> Tensor:
        if layer_idx in self._stored:
            old_keys, old_values = self._stored[layer_idx]
            key, value = torch.cat((old_keys, key), 2), torch.cat((old_values, value), 2)
        self._stored[layer_idx] = key, value
        group_size = query.shape[1] // key.shape[1]
        logits = (query @ key.repeat_interleave(group_size, 1).mT).float() * scaling
        num_new, num_keys = logits.shape[-2:]
        future = torch.ones(num_new, num_keys, dtype=torch.bool, device=query.device)
        logits.masked_fill_(future.triu(num_keys - num_new + 1), float("-inf"))
        weights = logits.softmax(-1).to(value.dtype)
        return weights @ value.repeat_interleave(group_size, 1)


def probe_token_ids(vocab_size: int, device: torch.device) -> Tensor:
    """Return the fixed token ids `[1, 24]` that both ways are run on."""
    return (torch.arange(_PROBE_TOKENS, device=device) * 7919 % vocab_size)[None]


@torch.inference_mode()
def own_logits(model: Any, token_ids: Tensor) -> Tensor:
    """Return the model's own float32 logits `[len, vocab_size]` for `[1, len]` ids."""
    logits: Tensor = model(input_ids=token_ids, use_cache=False).logits
    return logits[0].float()


@torch.inference_mode()
def layered_logits(decoder: LayeredDecoder, token_ids: Tensor) -> Tensor:
    """Return the logits of `own_logits`, computed layer by layer in two uneven chunks."""
    hidden = decoder.embed(token_ids)
    positions = torch.arange(token_ids.shape[1], device=token_ids.device)[None]
    cos, sin = decoder.rotate(hidden, positions)
    context = _ProbeContext()
    border = token_ids.shape[1] // 3
    for layer_idx in range(decoder.num_layers):
        chunks = [
            decoder.run_layer(layer_idx, hidden[:, part], (cos[:, part], sin[:, part]), context)
            for part in (slice(0, border), slice(border, None))
        ]
        hidden = torch.cat(chunks, dim=1)
    return decoder.logits(hidden[0])


def require_same_logits(family: str, own: Tensor, layered: Tensor, dtype: torch.dtype) -> None:
    """Compare both ways' logits.

    Raises:
        ModelLoadError: They differ by more than rounding in `dtype` explains.
    """
    spread = float(own.std())
    # Not the largest one: in bfloat16 a single logit among a million may be far off by rounding.
    difference = float((own - layered).square().mean().sqrt())
    tolerance = _TOLERANCE.get(dtype)
    if tolerance is None:
        raise ModelLoadError(f"{family} has weights in {dtype}, which is not served")
    if not difference <= tolerance * max(spread, 1e-6):
        raise ModelLoadError(
            f"{family}: running the layers one by one gives other logits than the model's own "
            f"forward (mean difference {difference:.3g}, spread {spread:.3g}), so this family "
            "scales or caps something outside its layers and cannot be served"
        )
