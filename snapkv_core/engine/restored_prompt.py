"""A prompt whose KV comes out of a snapshot: what reading it would have left behind."""

from torch import Tensor

from snapkv_core.engine.compression_report import compression_report
from snapkv_core.events import CompressionReport
from snapkv_core.kv_cache.manager import KVCacheManager
from snapkv_core.kv_cache.snapshot import PromptSnapshot
from snapkv_core.models.decoder import LayeredDecoder
from snapkv_core.sequence import Sequence


class RestoredPrompt:
    """Stands where a `PrefillCursor` has come to its end; only the engine thread uses it."""

    def __init__(
        self,
        sequence: Sequence,
        snapshot: PromptSnapshot,
        decoder: LayeredDecoder,
        manager: KVCacheManager,
    ) -> None:
        """Store all layers of a reserved sequence.

        Raises:
            KVCacheError: No page is free.
        """
        self._sequence = sequence
        self._snapshot = snapshot
        self._decoder = decoder
        self._manager = manager
        for layer_idx, (keys, values) in enumerate(
            zip(snapshot.keys, snapshot.values, strict=True)
        ):
            manager.restore_layer(
                sequence.seq_id, layer_idx, keys, values, snapshot.kv_lens[layer_idx]
            )

    def last_logits(self) -> Tensor:
        """Return the logits of the prompt's last token, `[vocab_size]`, float32."""
        hidden: Tensor = self._snapshot.last_hidden.to(self._decoder.device)
        return self._decoder.logits(hidden[None])[0]

    def report(self) -> CompressionReport:
        """Say what compression did when the prompt was read; none of it took time now."""
        return compression_report(
            self._sequence,
            self._manager,
            kept_attention_mass=self._snapshot.kept_attention_mass,
            kept_indices=self._snapshot.kept_indices,
            compress_ms=0.0,
        )

    def snapshot(self) -> PromptSnapshot:
        """Return what it was made from."""
        return self._snapshot
