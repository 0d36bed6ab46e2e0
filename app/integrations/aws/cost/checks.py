"""Compares costs with thresholds, and says so when too little is known for a verdict."""

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

from app.setting_groups.thresholds import CostThresholds

Verdict = Literal["within", "over", "unknown"]


@dataclass(frozen=True, slots=True)
class ThresholdCheck:
    """A threshold, and the two amounts between which the cost lies that it is for.

    Attributes:
        tier: Tier it is for; None for everything together.
        threshold: Cost above which the report is marked.
        at_least: Cost that certainly belongs to it.
        at_most: Cost that may belong to it.
    """

    tier: str | None
    threshold: Decimal
    at_least: Decimal
    at_most: Decimal

    @property
    def verdict(self) -> Verdict:
        """Whether the threshold is exceeded; `unknown` when only some of the cost may belong."""
        if self.at_least > self.threshold:
            return "over"
        return "within" if self.at_most <= self.threshold else "unknown"


def check_thresholds(
    thresholds: CostThresholds,
    total: Decimal,
    by_tier: Mapping[str, Decimal],
    *,
    is_attributed: bool,
) -> tuple[ThresholdCheck, ...]:
    """Check every threshold.

    Args:
        thresholds: The thresholds.
        total: Cost of the day.
        by_tier: The same by tier; under the empty name the cost that carries no tier.
        is_attributed: Whether that is the service's cost; the whole account's may be another's.

    Returns:
        One check for each threshold, that of the total first.
    """
    checks = []
    if thresholds.total is not None:
        at_least = total if is_attributed else Decimal()
        checks.append(ThresholdCheck(None, thresholds.total, at_least, total))
    for tier, threshold in thresholds.by_tier.items():
        own, untagged = by_tier.get(tier, Decimal()), by_tier.get("", Decimal())
        at_least = own if is_attributed else Decimal()
        checks.append(ThresholdCheck(tier, threshold, at_least, own + untagged))
    return tuple(checks)
