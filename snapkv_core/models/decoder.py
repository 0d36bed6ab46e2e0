"""A causal language model taken apart: embedding, one layer at a time, head.

The one integration point with transformers is its attention registry; nothing of a model class
is replaced and no state is kept on a module (ADR 0001).
"""

from typing import Any, Protocol

import torch
from torch import Tensor

from snapkv_core.errors import ModelLoadError


class AttentionContext(Protocol):
    """Takes the place of a cache object in a layer call: stores KV and attends."""

    @property
    def num_positions(self) -> int:
        """Positions that attention may span, for the check of a sliding window."""

    def attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float
    ) -> Tensor:
        """Store `key` and `value`, and attend from `query` to everything stored.

        Args:
            layer_idx: Layer that calls.
            query: After RoPE, `[batch, num_q_heads, len, head_dim]`.
            key: After RoPE, `[batch, num_kv_heads, len, head_dim]`.
            value: Shaped like `key`.
            scaling: Factor on the logits.

        Returns:
            Shaped like `query`.
        """


class LayeredDecoder:
    """The parts of a transformers causal LM, called one layer and one chunk at a time.

    Stateless beside the weights. Whether the parts put together equal the model is proven at
    load by `models.probe`.
    """

    def __init__(self, model: Any) -> None:
        """Take a model apart and switch it to the registered attention function.

        Raises:
            ModelLoadError: It does not have the parts.
        """
        base = model.base_model
        missing = [
            name
            for name in ("embed_tokens", "layers", "norm", "rotary_emb")
            if not hasattr(base, name)
        ]
        head = model.get_output_embeddings()
        if missing or head is None:
            raise ModelLoadError(
                f"{type(model).__name__} cannot be run layer by layer: it has no "
                f"{', '.join(missing) or 'output head'}"
            )
        # Late, as it imports much of transformers; see there.
        from snapkv_core.models.attention_function import ATTENTION_NAME

        model.set_attn_implementation(ATTENTION_NAME)
        self._base = base
        self._head = head
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self._base.layers)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Look up `[batch, len]` token ids; returns hidden states `[batch, len, hidden_size]`."""
        hidden: Tensor = self._base.embed_tokens(token_ids)
        return hidden

    def rotate(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return RoPE's cosines and sines for `[batch, len]` positions, in `hidden`'s dtype."""
        cos, sin = self._base.rotary_emb(hidden, positions)
        return cos, sin

    def run_layer(
        self,
        layer_idx: int,
        hidden: Tensor,
        rotation: tuple[Tensor, Tensor],
        context: AttentionContext,
    ) -> Tensor:
        """Run one decoder layer on `[batch, len, hidden_size]` and return the same shape."""
        output = self._base.layers[layer_idx](
            hidden, position_embeddings=rotation, snapkv_context=context
        )
        result: Tensor = output[0] if isinstance(output, tuple) else output
        return result

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits `[rows, vocab_size]` of last-layer states `[rows, hidden_size]`."""
        logits: Tensor = self._head(self._base.norm(hidden))
        return logits.float()
