"""Counts what a batch has done, and shows it while it runs and at its end."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

#: Between two lines where there is no terminal to show a bar.
_LINE_EVERY_S: Final = 10.0


@dataclass(slots=True)
class Figures:
    """Sums over results.

    Attributes:
        num_lines: Results, failed ones included.
        num_failed: Results without an answer of the model.
        prompt_tokens: Tokens read.
        completion_tokens: Tokens generated.
        num_compressed: Answers that say how their prompt was compressed.
        ratio_sum: Sum of their compression ratios.
    """

    num_lines: int = 0
    num_failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    num_compressed: int = 0
    ratio_sum: float = 0.0

    def add(self, record: Mapping[str, Any]) -> None:
        """Count a result; what an answer does not say counts as nothing."""
        self.num_lines += 1
        response = _fields_of(record, "response")
        if response.get("status_code") != 200:
            self.num_failed += 1
            return
        body = _fields_of(response, "body")
        usage, kv_cache = _fields_of(body, "usage"), _fields_of(body, "kv_cache")
        self.prompt_tokens += int(_number_of(usage, "prompt_tokens") or 0)
        self.completion_tokens += int(_number_of(usage, "completion_tokens") or 0)
        if (ratio := _number_of(kv_cache, "compression_ratio")) is not None:
            self.num_compressed += 1
            self.ratio_sum += ratio

    def plus(self, other: "Figures") -> "Figures":
        """Return the sums over the results of both."""
        return Figures(
            self.num_lines + other.num_lines,
            self.num_failed + other.num_failed,
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.num_compressed + other.num_compressed,
            self.ratio_sum + other.ratio_sum,
        )


class BatchProgress:
    """A bar on a terminal, elsewhere a line now and then; used as a context."""

    def __init__(self, console: Console, num_bytes: int) -> None:
        """Show how far a run is.

        Args:
            console: Where to.
            num_bytes: Length of the input; its lines are not counted before they are read.
        """
        self.kept = Figures()
        self.new = Figures()
        self._console = console
        self._num_bytes = num_bytes
        self._offset = 0
        self._started_s = self._told_s = time.monotonic()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("waiting for the model", total=max(1, num_bytes))

    def __enter__(self) -> "BatchProgress":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    @property
    def everything(self) -> Figures:
        """The sums over all results there are."""
        return self.kept.plus(self.new)

    def tell(self, text: str) -> None:
        """Print a line beside the bar."""
        self._console.print(text, highlight=False)

    def on_started(self) -> None:
        """Count seconds from here, where lines are sent."""
        self._started_s = self._told_s = time.monotonic()

    def on_kept(self, record: Mapping[str, Any], end: int) -> None:
        """Count a result of an earlier run, of the line that ends at this offset."""
        self.kept.add(record)
        self._move(end)

    def on_written(self, figures: Figures, end: int) -> None:
        """Count a new result, of the line that ends at this offset."""
        self.new = self.new.plus(figures)
        self._move(end)
        now_s = time.monotonic()
        if not self._console.is_terminal and now_s - self._told_s >= _LINE_EVERY_S:
            self._told_s = now_s
            share = self._offset / max(1, self._num_bytes)
            self.tell(f"{self._counts()}, {share:.0%} of the input")

    def finish(self) -> None:
        """Take the bar away and print the sums."""
        self._progress.stop()
        everything = self.everything
        table = Table(show_header=False)
        lines = f"{everything.num_lines:,}"
        if self.kept.num_lines:
            lines += f", {self.kept.num_lines:,} of them in earlier runs"
        table.add_row("lines done", lines)
        table.add_row("failed", f"{everything.num_failed:,}")
        table.add_row(
            "tokens",
            f"{everything.prompt_tokens:,} read, {everything.completion_tokens:,} generated",
        )
        elapsed_s = max(1e-3, time.monotonic() - self._started_s)
        if self.new.num_lines:
            read_per_s = self.new.prompt_tokens / elapsed_s
            generated_per_s = self.new.completion_tokens / elapsed_s
            rates = f"{read_per_s:,.1f} read, {generated_per_s:,.1f} generated"
            table.add_row("tokens per second", rates)
        if everything.num_compressed:
            mean = everything.ratio_sum / everything.num_compressed
            table.add_row("KV cache, mean", f"{mean:.1f} times smaller")
        self._console.print(table)

    def _move(self, end: int) -> None:
        self._offset = end
        self._progress.update(self._task, completed=end, description=self._counts())

    def _counts(self) -> str:
        total = self.everything
        elapsed_s = max(1e-3, time.monotonic() - self._started_s)
        rate = self.new.completion_tokens / elapsed_s
        return f"{total.num_lines:,} lines, {total.num_failed:,} failed, {rate:,.1f} tokens/s"


def _fields_of(record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    # Another kind of server may have answered, so anything may stand there.
    value = record.get(name)
    return value if isinstance(value, dict) else {}


def _number_of(record: Mapping[str, Any], name: str) -> float | None:
    value = record.get(name)
    return value if isinstance(value, int | float) and math.isfinite(value) else None
