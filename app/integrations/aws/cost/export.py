"""The report for programs: plain JSON values, amounts as exact decimal text."""

from decimal import Decimal
from typing import Any, Final

from app.integrations.aws.cost.checks import ThresholdCheck
from app.integrations.aws.cost.report import USD_PER_REQUEST, CostReport, Missing

#: Quotients have no last digit.
_UNIT_COST_PLACES: Final = 6


def to_json(report: CostReport) -> dict[str, Any]:
    """Return the report as values that `json.dumps` takes."""
    dates, forecast = report.dates, report.month_forecast
    tag = report.tag
    return {
        "day": dates.day.isoformat(),
        "is_estimate": not dates.is_settled,
        "made_at": report.made_at.isoformat(),
        "tag": None if tag is None else {"key": tag.key, "value": tag.value},
        "currency": report.currency,
        "cost": _text(report.of_day.total),
        "cost_by_service": _texts(report.of_day.by_service),
        "cost_by_tier": _texts(report.of_day.by_tier),
        "month_to_date": _text(report.month_to_date),
        "estimated_day": _estimated_day(report),
        "month_forecast": None if isinstance(forecast, Missing) else _text(forecast),
        "is_over_threshold": report.is_over,
        "thresholds": [_check(check) for check in report.checks],
        "usage": _usage(report),
        "missing": {
            name: part.reason
            for name, part in (("month_forecast", forecast), ("usage", report.usage))
            if isinstance(part, Missing)
        },
        "notices": list(report.notices),
        "cost_explorer_requests": report.num_requests,
        "cost_explorer_usd": _text(USD_PER_REQUEST * report.num_requests),
    }


def _estimated_day(report: CostReport) -> dict[str, Any] | None:
    if report.estimated_day_cost is None:
        return None
    day = report.dates.estimated_day
    return {"day": str(day), "cost": _text(report.estimated_day_cost)}


def _usage(report: CostReport) -> dict[str, Any] | None:
    usage = report.usage
    if isinstance(usage, Missing):
        return None
    return {
        "requests": usage.num_requests,
        "input_tokens": usage.num_input_tokens,
        "output_tokens": usage.num_output_tokens,
        "cost_per_1000_requests": _unit_cost(report.cost_per_1000_requests),
        "cost_per_million_tokens": _unit_cost(report.cost_per_million_tokens),
    }


def _check(check: ThresholdCheck) -> dict[str, Any]:
    return {
        "tier": check.tier,
        "threshold": _text(check.threshold),
        "at_least": _text(check.at_least),
        "at_most": _text(check.at_most),
        "verdict": check.verdict,
    }


def _texts(costs: dict[str, Decimal]) -> dict[str, str | None]:
    return {name: _text(cost) for name, cost in costs.items()}


def _unit_cost(cost: Decimal | None) -> str | None:
    return None if cost is None else _text(round(cost, _UNIT_COST_PLACES))


def _text(amount: Decimal | None) -> str | None:
    return None if amount is None else f"{amount:f}"
