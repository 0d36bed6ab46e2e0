"""What compression did to one prompt, whether it was read or came out of a snapshot."""

from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from snapkv_core.events import CompressionReport, KeptTokenCounts, SkipReason
from snapkv_core.kv_cache.manager import KVCacheManager
from snapkv_core.sequence import Sequence


def compression_report(
    sequence: Sequence,
    manager: KVCacheManager,
    *,
    kept_attention_mass: float,
    kept_indices: SequenceOf[Tensor] | None,
    compress_ms: float,
) -> CompressionReport:
    """Report on a prompt whose layers are all stored.

    Args:
        sequence: The sequence.
        manager: Where its KV is.
        kept_attention_mass: See `CompressionReport`.
        kept_indices: Prompt positions kept by each layer's heads, one head after another; None
            when all were. Needed only when the request asked to `explain`.
        compress_ms: Time that compressing took.
    """
    layout, num_tokens = manager.layout, sequence.num_prompt_tokens
    skipped: SkipReason | None = None
    if not sequence.compression.compresses(num_tokens):
        is_full = sequence.compression.method == "full"
        skipped = "method_full" if is_full else "prompt_fits_capacity"
    return CompressionReport(
        method=sequence.compression.method,
        original_entries=num_tokens,
        compressed_entries=manager.prompt_entries(sequence.seq_id),
        original_bytes=num_tokens * layout.token_bytes,
        compressed_bytes=manager.prompt_bytes(sequence.seq_id),
        kept_attention_mass=kept_attention_mass,
        skipped=skipped,
        compress_ms=compress_ms,
        kept_counts=_counts(sequence, manager, kept_indices) if sequence.explain else None,
    )


def _counts(
    sequence: Sequence, manager: KVCacheManager, kept_indices: SequenceOf[Tensor] | None
) -> KeptTokenCounts:
    layout, num_tokens = manager.layout, sequence.num_prompt_tokens
    if kept_indices is None:
        counts = torch.full((layout.num_layers, num_tokens), layout.num_kv_heads)
    else:
        counts = torch.stack(
            [torch.bincount(layer.cpu(), minlength=num_tokens) for layer in kept_indices]
        )
    return KeptTokenCounts(
        per_layer=tuple(bytes(layer) for layer in counts.tolist()),
        num_kv_heads=layout.num_kv_heads,
        total=tuple(counts.sum(dim=0).tolist()),
    )
