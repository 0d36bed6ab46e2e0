"""One prompt being read: all its tokens through a layer, then the next layer (ADR 0002)."""

import time
from typing import Final

import torch
from torch import Tensor

from snapkv_core.attention.base import AttentionBackend
from snapkv_core.compression.policies import select_layer
from snapkv_core.compression.selection import KeptTokens
from snapkv_core.engine.compression_report import compression_report
from snapkv_core.engine.logprobs import raw_logprobs
from snapkv_core.engine.step_plan import PrefillSlice, RawLogprobs
from snapkv_core.events import CompressionReport
from snapkv_core.kv_cache.manager import KVCacheManager
from snapkv_core.kv_cache.snapshot import PromptSnapshot
from snapkv_core.models.decoder import LayeredDecoder
from snapkv_core.models.spec import ModelSpec
from snapkv_core.sequence import Sequence

_BATCH: Final = 0  # a prompt is read alone, so the batch dimension is always 1
_HEAD_TOKENS: Final = 128


class PrefillCursor:
    """State between the slices of one prompt.

    ```text
    hidden            [prompt_len, hidden_size]   of the layer being run, replaced chunk by chunk
    keys, values      [num_kv_heads, prompt_len, head_dim]   of that layer only, then reused
    window_queries    [num_q_heads, window_size, head_dim]   of that layer, across chunk borders
    ```

    So at most one layer's full KV exists, whatever the number of layers. Only the engine thread
    uses it.
    """

    def __init__(
        self,
        sequence: Sequence,
        spec: ModelSpec,
        decoder: LayeredDecoder,
        backend: AttentionBackend,
        manager: KVCacheManager,
    ) -> None:
        self._sequence = sequence
        self._spec = spec
        self._decoder = decoder
        self._backend = backend
        self._manager = manager
        num_tokens = sequence.num_prompt_tokens
        self._compresses = sequence.compression.compresses(num_tokens)
        token_ids = torch.tensor([sequence.prompt_ids], device=decoder.device)
        positions = torch.arange(num_tokens, device=decoder.device)[None]
        # A copy: embeddings of a model may be views of its weights, and this one is written to.
        self._hidden = decoder.embed(token_ids).clone()
        self._rotation = decoder.rotate(self._hidden, positions)
        # A CPU is several times slower at attention in short formats, so it attends in float32.
        dtype = torch.float32 if decoder.device.type == "cpu" else decoder.dtype
        self._keys = self._hidden.new_empty(
            spec.num_kv_heads, num_tokens, spec.head_dim, dtype=dtype
        )
        self._values = torch.empty_like(self._keys)
        window = sequence.compression.window_size if self._compresses else 0
        self._window_start = num_tokens - window
        self._window_queries = self._keys.new_empty(spec.num_q_heads, window, spec.head_dim)
        self._masses: list[Tensor] = []
        self._kept: list[Tensor] = []
        self._compress_s = 0.0
        self._slice: PrefillSlice | None = None

    @property
    def num_positions(self) -> int:
        """Positions that attention may span; see `AttentionContext`."""
        return self._sequence.num_prompt_tokens

    def run(self, part: PrefillSlice) -> None:
        """Run one slice; after a layer's last token its KV is compressed and stored."""
        self._slice = part
        chunk = slice(part.token_start, part.token_end)
        cos, sin = self._rotation
        self._hidden[:, chunk] = self._decoder.run_layer(
            part.layer_idx, self._hidden[:, chunk], (cos[:, chunk], sin[:, chunk]), self
        )

    def attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float
    ) -> Tensor:
        """Append the chunk's KV to the layer's buffer and attend to all of it so far."""
        part = self._slice
        assert part is not None, "attend() is called by a layer that run() started"
        start, end = part.token_start, part.token_end
        self._keys[:, start:end] = key[_BATCH]
        self._values[:, start:end] = value[_BATCH]
        if end > self._window_start:
            first = max(start, self._window_start)
            at = slice(first - self._window_start, end - self._window_start)
            self._window_queries[:, at] = query[_BATCH, :, first - start :]
        output = self._backend.prefill(
            query[_BATCH], self._keys[:, :end], self._values[:, :end], scaling=scaling
        )
        if end == self._sequence.num_prompt_tokens:
            started_s = time.perf_counter()
            self._store_layer(layer_idx, scaling)
            self._compress_s += time.perf_counter() - started_s
        return output[None]

    def last_logits(self) -> Tensor:
        """Return the logits of the prompt's last token, `[vocab_size]`, float32."""
        return self._decoder.logits(self._hidden[_BATCH, -1:])[0]

    def logprobs(self, start: int, end: int, num_top: int) -> list[RawLogprobs]:
        """Return what the model thought of the prompt's tokens `[start, end)`.

        The head runs on some tokens at a time: the logits of a whole long prompt would need
        gigabytes.
        """
        token_ids = torch.tensor(self._sequence.prompt_ids, device=self._decoder.device)
        found: list[RawLogprobs] = []
        for first in range(start, end, _HEAD_TOKENS):
            last = min(first + _HEAD_TOKENS, end)
            logits = self._decoder.logits(self._hidden[_BATCH, first - 1 : last - 1])
            found += raw_logprobs(logits, token_ids[first:last], num_top)
        return found

    def report(self) -> CompressionReport:
        """Say what compression did, once all layers are stored."""
        return compression_report(
            self._sequence,
            self._manager,
            kept_attention_mass=self._kept_attention_mass(),
            kept_indices=self._kept_indices(),
            compress_ms=round(self._compress_s * 1_000, 3),
        )

    def snapshot(self) -> PromptSnapshot:
        """Copy what was stored, and what the first token needs, once all layers are stored."""
        keys, values = [], []
        for layer_idx in range(self._spec.num_layers):
            stored = self._manager.stored(self._sequence.seq_id, layer_idx)
            keys.append(torch.cat([head_keys for head_keys, _ in stored]).cpu())
            values.append(torch.cat([head_values for _, head_values in stored]).cpu())
        kept = self._kept_indices()
        return PromptSnapshot(
            keys=tuple(keys),
            values=tuple(values),
            kv_lens=self._manager.prompt_lens(self._sequence.seq_id),
            kept_indices=None if kept is None else tuple(layer.cpu() for layer in kept),
            # A copy: a view would hold the hidden states of the whole prompt.
            last_hidden=self._hidden[_BATCH, -1].to("cpu", copy=True),
            num_prompt_tokens=self._sequence.num_prompt_tokens,
            kept_attention_mass=self._kept_attention_mass(),
        )

    def _store_layer(self, layer_idx: int, scaling: float) -> None:
        sequence = self._sequence
        if not self._compresses:
            self._manager.write_layer(sequence.seq_id, layer_idx, self._keys, self._values)
            return
        selection = select_layer(
            sequence.compression, self._window_queries, self._keys, scaling=scaling
        )
        self._masses.append(selection.kept_attention_mass)
        self._kept.append(_kept_positions(selection.kept))
        self._manager.write_layer(
            sequence.seq_id,
            layer_idx,
            self._keys,
            self._values,
            kept_indices=selection.kept.indices,
            kept_lens=selection.kept.lengths,
        )

    def _kept_attention_mass(self) -> float:
        return float(torch.stack(self._masses).mean()) if self._masses else 1.0

    def _kept_indices(self) -> list[Tensor] | None:
        return self._kept if self._compresses else None


def _kept_positions(kept: KeptTokens) -> Tensor:
    """Return the prompt tokens that each head keeps, one head after another, `[sum]`, int32."""
    is_kept = torch.arange(kept.indices.shape[1]) < kept.lengths[:, None]
    return kept.indices[is_kept.to(kept.indices.device)].to(torch.int32)
