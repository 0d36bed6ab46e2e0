"""The engine part: everything that is measured without HTTP, for one number format."""

from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.attention import AttentionFigure, measure_attention
from benchmarks.engine_decode import (
    DecodeFigure,
    decode_config,
    dtype_name,
    measure_grid,
)
from benchmarks.engine_memory import MemoryFigure, measure_memory
from benchmarks.engine_prefill import PrefillFigure, measure_prefill
from benchmarks.figures import Ratio
from benchmarks.headline import measure_headline
from benchmarks.workload import Sizes
from snapkv_core import Engine, EngineConfig
from snapkv_core.models.loader import load_model


@dataclass(slots=True)
class EngineFigures:
    """What the engine part found; one list per kind of figure."""

    decode: list[DecodeFigure] = field(default_factory=list)
    prefill: list[PrefillFigure] = field(default_factory=list)
    memory: list[MemoryFigure] = field(default_factory=list)
    attention: list[AttentionFigure] = field(default_factory=list)
    ratios: list[Ratio] = field(default_factory=list)

    def add(self, other: "EngineFigures") -> None:
        """Take over the figures of another number format."""
        self.decode += other.decode
        self.prefill += other.prefill
        self.memory += other.memory
        self.attention += other.attention
        self.ratios += other.ratios


def measure_engine(config: EngineConfig, sizes: Sizes, say: Callable[[str], None]) -> EngineFigures:
    """Measure one model in one number format.

    Args:
        config: What the engine would be served with.
        sizes: How much to measure.
        say: Told what is going on.

    Raises:
        ModelLoadError: The model cannot be loaded.
        BenchmarkError: A figure could not be taken.
    """
    figures = EngineFigures()
    # Memory first: a process of its own has the machine to itself while this one holds nothing.
    figures.memory, ratios = measure_memory(config.model, config.dtype, sizes, say)
    figures.ratios += ratios
    say(f"loading {config.model} ({config.dtype})")
    loaded = load_model(config)
    # One model under several engines, so that sequences of both methods are there at once and
    # their steps can take turns.
    largest = max((*sizes.batch_sizes, sizes.headline_batch))
    full, compressed, short = (Engine(loaded, decode_config(config, largest)) for _ in range(3))
    figures.decode, ratios = measure_headline((full, compressed, short), sizes, say)
    figures.ratios += ratios
    figures.decode += measure_grid(full, compressed, sizes, say)
    figures.attention, ratios = measure_attention(compressed, sizes, say)
    figures.ratios += ratios
    del full, compressed, short
    serving = Engine(loaded, config)
    figures.prefill, ratios = measure_prefill(serving, sizes, say)
    figures.ratios += ratios
    say(f"engine part done ({dtype_name(serving)})")
    return figures
