"""The committed ratios of an earlier run, and what a new run is worth beside them.

Ratios only: absolute times belong to one machine on one day.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from benchmarks.errors import BenchmarkError
from benchmarks.figures import Ratio

DEFAULT_PATH: Final = Path(__file__).with_name("baseline.json")
#: A ratio may be this much worse than the baseline's before it is a regression.
TOLERANCE: Final = 0.10
_FORMAT: Final = 1

Verdict = Literal["same", "better", "worse", "missing", "new"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One ratio beside the baseline's.

    Attributes:
        name: Name of the ratio.
        before: The baseline's value; None when it has none.
        now: The run's value; None when it measured none.
        verdict: `worse` and `missing` are failures, the others are not.
    """

    name: str
    before: float | None
    now: float | None
    verdict: Verdict

    @property
    def is_failure(self) -> bool:
        """Whether the check fails because of it."""
        return self.verdict in ("worse", "missing")


def compare(
    baseline: Mapping[str, Ratio], ratios: Iterable[Ratio], tolerance: float = TOLERANCE
) -> list[Comparison]:
    """Compare the ratios of a run with a baseline.

    Args:
        baseline: Ratios by name; those of parts and number formats that the run did not measure
            at all are left out, any other one that the run lacks is reported as missing.
        ratios: What the run measured.
        tolerance: Share by which a ratio may be worse.
    """
    measured = {ratio.name: ratio for ratio in ratios}
    scopes = {_scope(name) for name in measured}
    expected = [name for name in baseline if _scope(name) in scopes]
    return [
        _judge(name, baseline.get(name), measured.get(name), tolerance)
        for name in sorted({*expected, *measured})
    ]


def read_baseline(path: Path) -> dict[str, Ratio]:
    """Read a baseline, ratios by name.

    Raises:
        BenchmarkError: It cannot be read or is no baseline.
    """
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            raise BenchmarkError(f"{path}: format {content['format']!r}, expected {_FORMAT}")
        return {name: _ratio(name, entry) for name, entry in content["ratios"].items()}
    except OSError as error:
        raise BenchmarkError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BenchmarkError(f"{path} is no baseline: {error!r}") from error


def update_baseline(path: Path, ratios: Sequence[Ratio]) -> None:
    """Write a run's ratios; those of parts and number formats it did not measure stay.

    Raises:
        BenchmarkError: The file that is there is no baseline.
    """
    scopes = {_scope(ratio.name) for ratio in ratios}
    old = read_baseline(path) if path.exists() else {}
    kept = {name: ratio for name, ratio in old.items() if _scope(name) not in scopes}
    entries = kept | {ratio.name: ratio for ratio in ratios}
    content = {
        "format": _FORMAT,
        "ratios": {
            name: {"value": round(ratio.value, 4), "better": ratio.better}
            for name, ratio in sorted(entries.items())
        },
    }
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _scope(name: str) -> str:
    """Return part and number format of a ratio, `engine/float32`."""
    return name.rpartition("/")[0]


def _ratio(name: str, entry: Any) -> Ratio:
    value, better = entry["value"], entry["better"]
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ValueError(f"{name}: the value must be a number above 0")
    if better not in ("higher", "lower"):
        raise ValueError(f"{name}: better must be 'higher' or 'lower'")
    return Ratio(name, float(value), better)


def _judge(name: str, before: Ratio | None, now: Ratio | None, tolerance: float) -> Comparison:
    if before is None or now is None:
        return Comparison(
            name,
            before=before.value if before else None,
            now=now.value if now else None,
            verdict="missing" if now is None else "new",
        )
    gain = now.value / before.value if now.better == "higher" else before.value / now.value
    verdict: Verdict = "same"
    if gain < 1 - tolerance:
        verdict = "worse"
    elif gain > 1 + tolerance:
        verdict = "better"
    return Comparison(name, before.value, now.value, verdict)
