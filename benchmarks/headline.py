"""The headline ratios of decoding."""

from collections.abc import Callable
from typing import Final

from benchmarks.contiguous import ContiguousRun, contiguous_ratio
from benchmarks.engine_decode import DecodeFigure, DecodeRun, measure_in_turn
from benchmarks.figures import Ratio
from benchmarks.workload import FULL, SNAPKV, Sizes
from snapkv_core import Engine

#: What the project promises of `full / snapkv` at the headline sizes, by number format.
_REQUIRED_GAIN: Final = {"float32": 2.0, "bfloat16": 3.0}
#: A compressed step may depend on the length of the prompt by a tenth.
_REQUIRED_FLATNESS: Final = 1.10


def measure_headline(
    engines: tuple[Engine, Engine, Engine], sizes: Sizes, say: Callable[[str], None]
) -> tuple[list[DecodeFigure], list[Ratio]]:
    """Measure long prompts full and compressed, short ones compressed; no pages are shared.

    Args:
        engines: One for each of these three, over one model.
        sizes: Batch and lengths.
        say: Told what is going on.
    """
    short_tokens, long_tokens = sizes.headline_lengths
    batch_size = sizes.headline_batch
    say(f"headline: {batch_size} sequences of {long_tokens:,} prompt tokens")
    with (
        DecodeRun(engines[0], FULL, prompt_tokens=long_tokens, num_choices=batch_size) as full_long,
        DecodeRun(
            engines[1], SNAPKV, prompt_tokens=long_tokens, num_choices=batch_size
        ) as kept_long,
        DecodeRun(
            engines[2], SNAPKV, prompt_tokens=short_tokens, num_choices=batch_size
        ) as kept_short,
    ):
        *figures, contiguous = measure_in_turn(
            (full_long, kept_long, kept_short, ContiguousRun(engines[2], kept_short)),
            rounds=2 * sizes.rounds,
            steps_per_round=sizes.steps_per_round,
        )
    ratios = headline_ratios(*figures)
    return figures, [*ratios, contiguous_ratio(figures[2], contiguous)]


def headline_ratios(
    full_long: DecodeFigure, kept_long: DecodeFigure, kept_short: DecodeFigure
) -> list[Ratio]:
    """Return what compression gains, and how little a compressed step knows of its prompt."""
    part = f"engine/{full_long.dtype}"
    size = f"{full_long.batch_size}x{full_long.prompt_tokens}"
    return [
        Ratio(
            f"{part}/decode step, full over snapkv, {size}",
            full_long.step_ms / kept_long.step_ms,
            "higher",
            _REQUIRED_GAIN.get(full_long.dtype),
        ),
        Ratio(
            f"{part}/decode step, {kept_long.prompt_tokens} over {kept_short.prompt_tokens} tokens",
            kept_long.step_ms / kept_short.step_ms,
            "lower",
            _REQUIRED_FLATNESS,
        ),
        Ratio(
            f"{part}/KV bytes, full over snapkv, {size}",
            full_long.kv_bytes / kept_long.kv_bytes,
            "higher",
        ),
    ]
