"""Draws figures into PNG files, without a display."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.engine_decode import DecodeFigure
from benchmarks.mixed_scenario import MixedFigure

_LINE_STYLES: Final = {"full": "--", "snapkv": "-"}
_MIB: Final = 1024 * 1024


def plot_decode(figures: Sequence[DecodeFigure], folder: Path) -> list[Path]:
    """Draw decode throughput over the batch, and the step over the prompt, for each format.

    Args:
        figures: Figures of any batch sizes and prompt lengths.
        folder: Folder that takes the files.

    Returns:
        The files.
    """
    paths = []
    for dtype in sorted({row.dtype for row in figures}):
        rows = [row for row in figures if row.dtype == dtype]
        paths += [
            _draw(
                folder / f"decode_tokens_per_s_{dtype}.png",
                f"Decode throughput, {dtype}",
                ("sequences in the batch", "tokens/s"),
                partial(_draw_throughput, rows=rows),
            ),
            _draw(
                folder / f"decode_step_ms_{dtype}.png",
                f"Decode step, {dtype}",
                ("prompt tokens", "ms per step"),
                partial(_draw_steps, rows=rows),
            ),
        ]
    return paths


def plot_mixed(figures: Sequence[MixedFigure], path: Path) -> Path:
    """Draw each gap of the running streams over the time since the long prompt was sent."""

    def draw(axes: Axes) -> None:
        for row in figures:
            at_s = [end_ms / 1e3 for end_ms, _ in row.timeline_ms]
            axes.plot(at_s, [gap_ms for _, gap_ms in row.timeline_ms], ".", label=row.target)
            axes.axvspan(0, row.long_ttft_ms / 1e3, alpha=0.1)
        axes.set_yscale("log")

    labels = ("seconds since a long prompt was sent; it is read in the shaded time", "gap, ms")
    return _draw(path, "Gaps between tokens of running streams", labels, draw)


def plot_memory(samples: Sequence[tuple[float, float]], path: Path) -> Path:
    """Draw the resident memory of a server over time.

    Args:
        samples: Seconds since the load began, and bytes.
        path: The file.
    """

    def draw(axes: Axes) -> None:
        axes.plot(
            [at_s for at_s, _ in samples],
            [size_bytes / _MIB for _, size_bytes in samples],
            label="server",
        )

    return _draw(path, "Resident memory under load", ("seconds", "MiB"), draw)


def _columns(points: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _line(points: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    """Sort the points; of two measurements of the same size the grid's, which comes later."""
    return sorted(dict(points).items())


def _draw_throughput(axes: Axes, rows: Sequence[DecodeFigure]) -> None:
    for method, style in _LINE_STYLES.items():
        for color, num_tokens in enumerate(sorted({row.prompt_tokens for row in rows})):
            line = _line(
                (row.batch_size, row.tokens_per_s)
                for row in rows
                if row.method == method and row.prompt_tokens == num_tokens
            )
            label = f"{method}, {num_tokens:,} tokens"
            axes.plot(*_columns(line), style, marker="o", color=f"C{color}", label=label)


def _draw_steps(axes: Axes, rows: Sequence[DecodeFigure]) -> None:
    for method, style in _LINE_STYLES.items():
        for color, batch_size in enumerate(sorted({row.batch_size for row in rows})):
            line = _line(
                (row.prompt_tokens, row.step_ms)
                for row in rows
                if row.method == method and row.batch_size == batch_size
            )
            label = f"{method}, batch {batch_size}"
            axes.plot(*_columns(line), style, marker="o", color=f"C{color}", label=label)


def _draw(path: Path, title: str, labels: tuple[str, str], draw: Callable[[Axes], None]) -> Path:
    """Make one picture; without pyplot, so no state outlives the call."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    draw(axes)
    axes.set(title=title, xlabel=labels[0], ylabel=labels[1])
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    return path
