"""Costs of a day above which a report is marked, as people write them: `100,medium=80`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Final

_AMOUNT: Final = re.compile(r"[0-9]{1,12}(\.[0-9]{1,6})?")


@dataclass(frozen=True, slots=True)
class CostThresholds:
    """Costs of a day above which the report is marked, in the currency of the bill.

    Attributes:
        total: Threshold of everything together; None when there is none.
        by_tier: Threshold of each tier that has one, in the order they were given.
    """

    total: Decimal | None = None
    by_tier: Mapping[str, Decimal] = field(default_factory=dict)


def parse_thresholds(text: str) -> CostThresholds:
    """Read thresholds such as `100`, `medium=80,large=300` or `100,medium=80`.

    Raises:
        ValueError: A part cannot be read, is not above zero or comes twice; the message says
            which.
    """
    found: dict[str, Decimal] = {}
    for part in (part.strip() for part in text.split(",")):
        tier, equals, amount = (piece.strip() for piece in part.rpartition("="))
        if (equals and not tier) or not _AMOUNT.fullmatch(amount) or not Decimal(amount):
            raise ValueError(
                f"must be amounts above zero such as 100 or medium=80, with commas between; "
                f"{part!r} is none"
            )
        if tier in found:
            raise ValueError(f"names {f'tier {tier}' if tier else 'the total'} twice")
        found[tier] = Decimal(amount)
    total = found.pop("", None)
    return CostThresholds(total, found)
