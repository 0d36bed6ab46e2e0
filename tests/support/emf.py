"""A reader of CloudWatch's embedded metric format, written from its specification.

It refuses what CloudWatch would drop without a word: unknown units, members that a directive may
not have, targets that are missing at the root.
"""

import json
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

_UNITS = Literal[
    "Seconds", "Microseconds", "Milliseconds", "Bytes", "Kilobytes", "Megabytes", "Gigabytes",
    "Terabytes", "Bits", "Kilobits", "Megabits", "Gigabits", "Terabits", "Percent", "Count",
    "Bytes/Second", "Kilobytes/Second", "Megabytes/Second", "Gigabytes/Second", "Terabytes/Second",
    "Bits/Second", "Kilobits/Second", "Megabits/Second", "Gigabits/Second", "Terabits/Second",
    "Count/Second", "None",
]  # fmt: skip

_Text = Annotated[str, Field(min_length=1, max_length=1_024)]
#: Milliseconds of the years 2020 to 2100: seconds or microseconds are neither.
_Millis = Annotated[int, Field(gt=1_577_836_800_000, lt=4_102_444_800_000)]

MAX_METRICS: Final = 100
MAX_DIMENSIONS: Final = 30


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class _Metric(_Strict):
    Name: _Text
    Unit: _UNITS
    StorageResolution: Literal[1, 60] = 60


class _Directive(_Strict):
    Namespace: _Text
    Dimensions: list[Annotated[list[_Text], Field(max_length=MAX_DIMENSIONS)]]
    Metrics: Annotated[list[_Metric], Field(min_length=1, max_length=MAX_METRICS)]


class _Metadata(_Strict):
    Timestamp: _Millis
    CloudWatchMetrics: Annotated[list[_Directive], Field(min_length=1)]


@dataclass(frozen=True, slots=True)
class EmfLine:
    """What CloudWatch makes of one line.

    Attributes:
        namespace: Namespace of its metrics.
        dimensions: Values by name, of the one set there is.
        values: Metrics by name.
        units: Their units.
        line: The whole line.
    """

    namespace: str
    dimensions: dict[str, str]
    values: dict[str, float]
    units: dict[str, str]
    line: dict[str, Any]


def read_emf(text: str) -> EmfLine:
    """Read a line as CloudWatch does.

    Raises:
        ValueError: The line breaks the specification.
    """
    line = json.loads(text, parse_constant=_reject_constant)
    metadata = _Metadata.model_validate(line["_aws"])
    (directive,) = metadata.CloudWatchMetrics
    (names,) = directive.Dimensions
    dimensions = {name: line[name] for name in names}
    for name, value in dimensions.items():
        if not (isinstance(value, str) and value.strip() and value.isascii() and len(value) < 1025):
            raise ValueError(f"dimension {name} is {value!r}")
    values = {metric.Name: line[metric.Name] for metric in directive.Metrics}
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"metric {name} is {value!r}")
    units = {metric.Name: str(metric.Unit) for metric in directive.Metrics}
    return EmfLine(directive.Namespace, dimensions, values, units, line)


def emf_lines(log: str) -> list[EmfLine]:
    """Read those lines of a log that hold metrics."""
    return [read_emf(text) for text in log.splitlines() if '"_aws"' in text]


def _reject_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
