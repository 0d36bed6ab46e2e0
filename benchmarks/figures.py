"""Arithmetic on measurements, and the ratios that are compared from run to run; no I/O."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal


@dataclass(frozen=True, slots=True)
class Ratio:
    """Two figures of one run, one over the other.

    Attributes:
        name: `part/number format/what over what, with its sizes`; the key in a baseline.
        value: The quotient.
        better: Which way is an improvement.
        required: What the project promises: a floor when higher is better, otherwise a ceiling;
            None when nothing is promised.
    """

    name: str
    value: float
    better: Literal["higher", "lower"]
    required: float | None = None

    @property
    def is_met(self) -> bool:
        """Whether the promise is kept; true when there is none."""
        if self.required is None:
            return True
        if self.better == "higher":
            return self.value >= self.required
        return self.value <= self.required


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """A time that somebody waited, and the longest that the project promises; in no baseline.

    Attributes:
        name: `part/number format/what`.
        value_ms: The time.
        at_most_ms: The promise.
    """

    name: str
    value_ms: float
    at_most_ms: float

    @property
    def is_met(self) -> bool:
        """Whether the promise is kept."""
        return self.value_ms <= self.at_most_ms


@dataclass(frozen=True, slots=True)
class Latency:
    """Summary of some waiting times, milliseconds.

    Attributes:
        count: How many there were.
        p50_ms: Median.
        p99_ms: 99th percentile, interpolated; of fewer than 100 values it is nearly the maximum.
        max_ms: The longest.
    """

    count: int
    p50_ms: float
    p99_ms: float
    max_ms: float

    @classmethod
    def of_seconds(cls, values_s: Sequence[float]) -> "Latency":
        """Summarise times in seconds.

        Raises:
            ValueError: There are none.
        """
        return cls(
            count=len(values_s),
            p50_ms=percentile(values_s, 50) * 1e3,
            p99_ms=percentile(values_s, 99) * 1e3,
            max_ms=percentile(values_s, 100) * 1e3,
        )


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile, linear between the two values around it.

    Raises:
        ValueError: There are no values, or `percent` is not between 0 and 100.
    """
    if not values:
        raise ValueError("no values to take a percentile of")
    if not 0 <= percent <= 100:
        raise ValueError(f"a percentile is between 0 and 100, got {percent}")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below, above = ordered[math.floor(place)], ordered[math.ceil(place)]
    return below + (above - below) * (place - math.floor(place))


def gaps_s(
    times_s: Sequence[float], start_s: float = -math.inf, end_s: float = math.inf
) -> list[float]:
    """Return the times between neighbours, of those pairs that reach into `(start_s, end_s)`."""
    return [
        later - earlier
        for earlier, later in pairwise(times_s)
        if later > start_s and earlier < end_s
    ]


def slope_percent_per_minute(samples: Sequence[tuple[float, float]]) -> float:
    """Return the least-squares slope of `(seconds, size)` samples, in % of their mean a minute."""
    if len(samples) < 2:
        return 0.0
    mean_s = sum(at_s for at_s, _ in samples) / len(samples)
    mean_size = sum(size for _, size in samples) / len(samples)
    spread = sum((at_s - mean_s) ** 2 for at_s, _ in samples)
    if spread == 0 or mean_size == 0:
        return 0.0
    slope = sum((at_s - mean_s) * (size - mean_size) for at_s, size in samples) / spread
    return slope * 60 / mean_size * 100


def change_between_quarters_percent(samples: Sequence[tuple[float, float]]) -> float:
    """Return by how much the mean of the last quarter exceeds that of the first, in %."""
    quarter = len(samples) // 4
    if quarter == 0:
        return 0.0
    first = sum(size for _, size in samples[:quarter]) / quarter
    last = sum(size for _, size in samples[-quarter:]) / quarter
    return (last / first - 1) * 100
