"""Times one decode attention call over stored KV against attention over dense tensors."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.engine_decode import dtype_name
from benchmarks.figures import Ratio
from benchmarks.machine import wait_for
from benchmarks.workload import Sizes
from snapkv_core import Engine
from snapkv_core.kv_cache.manager import KVCacheManager

_CALLS_PER_ROUND: Final = 5


@dataclass(frozen=True, slots=True)
class AttentionFigure:
    """Decode attention of one layer.

    Attributes:
        dtype: Number format of queries, keys and values.
        batch_size: Sequences, one query token each.
        stored_tokens: Tokens stored for each.
        stored_us: Median time of the engine's backend over stored KV, microseconds.
        dense_us: Median time of `scaled_dot_product_attention` over dense tensors.
    """

    dtype: str
    batch_size: int
    stored_tokens: int
    stored_us: float
    dense_us: float


def measure_attention(
    engine: Engine, sizes: Sizes, say: Callable[[str], None]
) -> tuple[list[AttentionFigure], list[Ratio]]:
    """Time attention over stored and over dense KV in turn, with the shape of the engine's model.

    Args:
        engine: Gives shape, number format and device; it is not run.
        sizes: Batch, stored tokens and turns.
        say: Told what is going on.
    """
    figures = []
    for num_tokens in sizes.attention_tokens:
        say(f"attention: {sizes.headline_batch} x {num_tokens:,} stored tokens")
        stored, dense = _two_ways(engine, sizes.headline_batch, num_tokens)
        stored_s: list[float] = []
        dense_s: list[float] = []
        for _ in range(sizes.rounds):
            stored_s += _times_s(stored, engine.device)
            dense_s += _times_s(dense, engine.device)
        figures.append(
            AttentionFigure(
                dtype=dtype_name(engine),
                batch_size=sizes.headline_batch,
                stored_tokens=num_tokens,
                stored_us=median(stored_s) * 1e6,
                dense_us=median(dense_s) * 1e6,
            )
        )
    return figures, [attention_ratio(figure) for figure in figures]


def attention_ratio(figure: AttentionFigure) -> Ratio:
    """Return what attending to the store costs in terms of dense attention."""
    size = f"{figure.batch_size}x{figure.stored_tokens}"
    return Ratio(
        f"engine/{figure.dtype}/decode attention, stored over dense, {size}",
        figure.stored_us / figure.dense_us,
        "lower",
    )


def _two_ways(
    engine: Engine, batch_size: int, num_tokens: int
) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Return attention over the engine's kind of store and over dense tensors, same numbers."""
    layout = replace(engine.parts.layout, num_layers=1)
    scaling = layout.head_dim**-0.5
    shape = (batch_size, layout.num_kv_heads, num_tokens, layout.head_dim)
    generator = torch.Generator().manual_seed(0)

    def noise(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(engine.device, engine.dtype)

    keys, values = noise(*shape), noise(*shape)
    queries = noise(batch_size, engine.spec.num_q_heads, layout.head_dim)
    manager = KVCacheManager(
        layout,
        num_pages=batch_size * layout.num_kv_heads * layout.pages_for(num_tokens),
        max_num_seqs=batch_size,
        dtype=engine.dtype,
        device=engine.device,
    )
    for seq_id in range(batch_size):
        manager.reserve(seq_id)
        manager.write_layer(seq_id, 0, keys[seq_id, :, :-1], values[seq_id, :, :-1])
    # As in a decode step, the last token is the one that has just been appended.
    step = manager.begin_step(range(batch_size))
    manager.append(step, 0, keys[:, :, -1], values[:, :, -1])
    backend = engine.parts.backend

    @torch.inference_mode()
    def over_store() -> Tensor:
        return backend.decode(queries, step.layers[0], scaling=scaling)

    @torch.inference_mode()
    def over_dense() -> Tensor:
        return F.scaled_dot_product_attention(
            queries[:, :, None], keys, values, scale=scaling, enable_gqa=True
        )

    return over_store, over_dense


def _times_s(call: Callable[[], Tensor], device: torch.device) -> list[float]:
    """Return the seconds of some calls, after one that is not timed."""
    times_s = []
    call()
    for _ in range(_CALLS_PER_ROUND):
        wait_for(device)
        start_s = time.perf_counter()
        call()
        wait_for(device)
        times_s.append(time.perf_counter() - start_s)
    return times_s
