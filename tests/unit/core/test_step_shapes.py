"""What a step of the KV store costs depends on its own sequences, not on others before it."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.core.test_kv_cache_manager import _HEAD_DIM as HEAD_DIM
from tests.unit.core.test_kv_cache_manager import _HEADS as HEADS
from tests.unit.core.test_kv_cache_manager import _LAYERS as LAYERS
from tests.unit.core.test_kv_cache_manager import _ROWS as ROWS
from tests.unit.core.test_kv_cache_manager import new_manager


class _Shapes(TorchDispatchMode):
    """Notes the shape of each tensor that an operation gives."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, ...]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        """Run an operation."""
        del types
        output = func(*args, **(kwargs or {}))
        # Neither views nor what writes into a tensor that is there make a copy of it.
        if isinstance(output, Tensor) and output._base is None and not func._schema.is_mutable:
            self.seen.append(tuple(output.shape))
        return output


def test_a_long_sequence_that_has_ended_costs_later_steps_nothing() -> None:
    """The tables stay as wide as it made them; steps work on what their sequences need."""
    shapes = []
    for long_tokens in (None, 380):
        manager = new_manager(1, num_pages=400 * ROWS)
        for seq_id, num_tokens in ((1, long_tokens), (2, 5)):
            if num_tokens is not None:
                manager.reserve(seq_id)
                for layer_idx in range(LAYERS):
                    entries = torch.ones(HEADS, num_tokens, HEAD_DIM)
                    manager.write_layer(seq_id, layer_idx, entries, entries)
        manager.free(1)
        manager.begin_step([2])  # may widen the tables for the next token
        with _Shapes() as noted:
            manager.begin_step([2])
        shapes.append(noted.seen)
    assert shapes[0] == shapes[1]
