"""Asks Cost Explorer for costs by day, service and tier, a forecast, and a tag's status."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from typing import Any, Final, Literal

from app.integrations.aws.cost.errors import CostReportError, aws_call

#: Where the SDK sends requests when its chain knows no region. Cost Explorer has one endpoint for
#: each partition, to which the SDK sends requests from all its regions.
FALLBACK_REGION: Final = "us-east-1"

#: A month of a large account is a handful; each is paid for.
_MAX_PAGES: Final = 40
_MAX_AMOUNT: Final = 10**12
_CURRENCY: Final = re.compile(r"[A-Z]{3}")

TagStatus = Literal["active", "inactive", "unseen", "unreadable"]


@dataclass(frozen=True, slots=True)
class Tag:
    """A tag that costs are filtered by."""

    key: str
    value: str

    def __str__(self) -> str:
        return f"{self.key}={self.value}"


@dataclass(frozen=True, slots=True)
class CostRow:
    """What a service of a tier cost on a day, without rounding; `tier` is empty without a tag."""

    day: date
    service: str
    tier: str
    amount: Decimal


@dataclass(frozen=True, slots=True)
class CostTable:
    """Costs in one currency, which is None when there are none."""

    rows: tuple[CostRow, ...]
    currency: str | None

    def between(self, first: date, last: date) -> "CostTable":
        """Return the costs of some days, the last one included."""
        return CostTable(tuple(row for row in self.rows if first <= row.day <= last), self.currency)

    @property
    def total(self) -> Decimal:
        """Everything together."""
        return sum((row.amount for row in self.rows), Decimal())

    @property
    def by_service(self) -> dict[str, Decimal]:
        """Sum of each service, the most expensive first."""
        return _sums((row.service, row.amount) for row in self.rows)

    @property
    def by_tier(self) -> dict[str, Decimal]:
        """Sum of each tier, the most expensive first."""
        return _sums((row.tier, row.amount) for row in self.rows)


class CostExplorer:
    """Cost Explorer as this report asks it. Every request costs money and is counted.

    Attributes:
        num_requests: HTTP requests sent so far, with those that were tried again.
    """

    def __init__(self, client: Any, tier_tag_key: str) -> None:
        self.num_requests = 0
        self._client = client
        self._tier_tag_key = tier_tag_key
        client.meta.events.register("before-send.cost-explorer", self._count)

    def costs(self, start: date, end: date, tag: Tag | None) -> CostTable:
        """Return the unblended costs of the days from `start` to the one before `end`.

        Args:
            start: First day.
            end: First day after.
            tag: Tag that the resources carry; None takes the whole account.

        Raises:
            CostReportError: Cost Explorer cannot be asked, does not answer in its own form, or
                costs come in several currencies.
        """
        request: dict[str, Any] = {
            **_period(start, end),
            **_filter(tag),
            "Metrics": ["UnblendedCost"],
            "GroupBy": [
                {"Type": "DIMENSION", "Key": "SERVICE"},
                {"Type": "TAG", "Key": self._tier_tag_key},
            ],
        }
        rows: list[CostRow] = []
        currencies: set[str] = set()
        for _ in range(_MAX_PAGES):
            with aws_call("ce:GetCostAndUsage"):
                answer = self._client.get_cost_and_usage(**request)
                for row, currency in self._rows(answer):
                    if not start <= row.day < end:
                        raise ValueError(f"no cost of {row.day} was asked for")
                    rows.append(row)
                    currencies.add(currency)
                token = answer.get("NextPageToken")
            if not token:
                break
            request["NextPageToken"] = token
        else:
            raise CostReportError(f"ce:GetCostAndUsage: more than {_MAX_PAGES} pages")
        if len(currencies) > 1:
            raise CostReportError(f"costs come in several currencies: {sorted(currencies)}")
        return CostTable(tuple(rows), next(iter(currencies), None))

    def forecast(self, start: date, end: date, tag: Tag | None) -> tuple[Decimal, str]:
        """Return what the days from `start`, not before today, to the one before `end` will cost.

        Returns:
            The sum of the days, and its currency.

        Raises:
            CostReportError: There is no forecast; its code is `DataUnavailableException` when AWS
                has too little history for one.
        """
        # By day: a forecast by month that starts within one is of the whole month.
        request = {**_period(start, end), **_filter(tag), "Metric": "UNBLENDED_COST"}
        with aws_call("ce:GetCostForecast"):
            return _money(self._client.get_cost_forecast(**request)["Total"])

    def tag_status(self, key: str) -> TagStatus:
        """Tell whether costs can be told apart by a tag, as far as this account may know.

        Only the payer account may list the tags, so a refusal is an answer and no error.
        """
        try:
            with aws_call("ce:ListCostAllocationTags"):
                answer = self._client.list_cost_allocation_tags(TagKeys=[key], Type="UserDefined")
                statuses = {tag["TagKey"]: tag["Status"] for tag in answer["CostAllocationTags"]}
        except CostReportError:
            return "unreadable"
        if key not in statuses:
            return "unseen"
        return "active" if statuses[key] == "Active" else "inactive"

    def _rows(self, answer: Mapping[str, Any]) -> Iterator[tuple[CostRow, str]]:
        prefix = f"{self._tier_tag_key}$"
        for result in answer["ResultsByTime"]:
            day = date.fromisoformat(result["TimePeriod"]["Start"])
            for group in result["Groups"]:
                service, tier = group["Keys"]
                if not tier.startswith(prefix):
                    raise ValueError("costs are not grouped by the tag")
                amount, currency = _money(group["Metrics"]["UnblendedCost"])
                if amount:
                    yield CostRow(day, service, tier.removeprefix(prefix), amount), currency

    def _count(self, **_event: object) -> None:
        self.num_requests += 1


def _period(start: date, end: date) -> dict[str, Any]:
    return {
        "TimePeriod": {"Start": start.isoformat(), "End": end.isoformat()},
        "Granularity": "DAILY",
    }


def _filter(tag: Tag | None) -> dict[str, Any]:
    return {} if tag is None else {"Filter": {"Tags": {"Key": tag.key, "Values": [tag.value]}}}


def _money(metric: Mapping[str, Any]) -> tuple[Decimal, str]:
    amount, currency = Decimal(str(metric["Amount"])), str(metric["Unit"])
    if not amount.is_finite() or abs(amount) >= _MAX_AMOUNT or not _CURRENCY.fullmatch(currency):
        raise ValueError("no amount of money")
    return amount, currency


def _sums(parts: Iterator[tuple[str, Decimal]]) -> dict[str, Decimal]:
    sums: dict[str, Decimal] = {}
    for name, amount in parts:
        sums[name] = sums.get(name, Decimal()) + amount
    return dict(sorted(sums.items(), key=lambda item: (-item[1], item[0])))
