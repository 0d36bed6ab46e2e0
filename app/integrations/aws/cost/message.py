"""The report in words: a subject, a message for people, and rows that a table can show too."""

from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

from app.integrations.aws.cost.checks import ThresholdCheck
from app.integrations.aws.cost.report import USD_PER_REQUEST, CostReport, Missing

_MAX_ROWS: Final = 20
_HALF_A_CENT: Final = Decimal("0.005")
_UNIT_COST_PLACES: Final = 4


@dataclass(frozen=True, slots=True)
class Section:
    """Rows of a figure and what it is, under a title."""

    title: str
    rows: tuple[tuple[str, str], ...]


def subject_of(report: CostReport) -> str:
    """Return the subject: ASCII, far below the 100 characters that SNS takes."""
    marks = [] if report.tag is not None else ["whole account"]
    marks += [] if report.dates.is_settled else ["estimate"]
    mark = f" ({', '.join(marks)})" if marks else ""
    over = "OVER THRESHOLD: " if report.is_over else ""
    cost = money(report.of_day.total, report.currency)
    return f"{over}SnapKV cost {report.dates.day}: {cost}{mark}"


def message_of(report: CostReport) -> str:
    """Return the message: the day and its thresholds first, then the details."""
    parts = ["\n".join([headline_of(report), *(threshold_line(report, c) for c in report.checks)])]
    for section in sections_of(report):
        width = max(len(figure) for figure, _ in section.rows)
        lines = [f"  {figure:>{width}}  {what}" for figure, what in section.rows]
        parts.append("\n".join([section.title, *lines]))
    parts.append("\n".join(["Notes", *(f"- {note}" for note in notes_of(report))]))
    return "\n\n".join(parts) + "\n"


def headline_of(report: CostReport) -> str:
    """Return what the day cost, in a sentence."""
    whose = "the whole account" if report.tag is None else f"resources tagged {report.tag}"
    estimate = "" if report.dates.is_settled else " so far, an estimate"
    cost = money(report.of_day.total, report.currency)
    return f"Cost of {report.dates.day}, {whose}: {cost}{estimate}"


def threshold_line(report: CostReport, check: ThresholdCheck) -> str:
    """Return what became of a threshold, in a sentence."""
    threshold = money(check.threshold, report.currency)
    whose = threshold if check.tier is None else f"{threshold} for tier {check.tier}"
    least, most = (money(cost, report.currency) for cost in (check.at_least, check.at_most))
    match check.verdict:
        case "over":
            excess = money(check.at_least - check.threshold, report.currency)
            return f"OVER the threshold of {whose}, by {excess}"
        case "within":
            return f"Within the threshold of {whose}"
        case "unknown":
            return (
                f"The threshold of {whose} cannot be checked: the cost that it is for is between "
                f"{least} and {most}"
            )


def sections_of(report: CostReport) -> tuple[Section, ...]:
    """Return the details; a section without rows is left out."""
    sections = (
        Section("By service", _rows(report, report.of_day.by_service.items())),
        Section("By tier", _tier_rows(report)),
        Section("Month", tuple(_month_rows(report))),
        Section("Requests", tuple(_request_rows(report))),
    )
    return tuple(section for section in sections if section.rows)


def notes_of(report: CostReport) -> tuple[str, ...]:
    """Return what a reader has to know or do, the most important first."""
    notes = list(report.notices)
    if isinstance(report.month_forecast, Missing):
        notes.append(f"No forecast: {report.month_forecast.reason}.")
    if isinstance(report.usage, Missing):
        notes.append(f"No cost per request: {report.usage.reason}.")
    notes.append(
        "Days are UTC, and Cost Explorer lags: a day is complete two days later. AWS may correct "
        "amounts until it closes the month's bill."
    )
    price = USD_PER_REQUEST * report.num_requests
    notes.append(
        f"Made {report.made_at:%Y-%m-%d %H:%M} UTC with {report.num_requests} requests to Cost "
        f"Explorer, which cost {money(price, 'USD')}."
    )
    return tuple(notes)


def money(amount: Decimal, currency: str | None, places: int = 2) -> str:
    """Write an amount for people, rounded."""
    # Adding zero makes zero of minus zero.
    text = f"{round(amount, places) + 0:,.{places}f}"
    return text if currency is None else f"{text} {currency}"


def _rows(report: CostReport, costs: Iterable[tuple[str, Decimal]]) -> tuple[tuple[str, str], ...]:
    """Return the largest costs, and the others as one row, so that nothing of the sum is lost."""
    shown: list[tuple[str, Decimal]] = []
    others: list[Decimal] = []
    for name, cost in costs:
        if abs(cost) >= _HALF_A_CENT and len(shown) < _MAX_ROWS:
            shown.append((name, cost))
        else:
            others.append(cost)
    if others:
        name = f"{len(others)} other{'s' if len(others) > 1 else ''}"
        shown.append((name, sum(others, Decimal())))
    return tuple((money(cost, report.currency), name) for name, cost in shown)


def _tier_rows(report: CostReport) -> tuple[tuple[str, str], ...]:
    by_tier = report.of_day.by_tier
    if not by_tier.keys() - {""}:
        return ()
    untagged = f"without the tag {report.tier_tag_key}"
    return _rows(report, [(tier or untagged, cost) for tier, cost in by_tier.items()])


def _month_rows(report: CostReport) -> Iterable[tuple[str, str]]:
    dates, currency = report.dates, report.currency
    yield money(report.month_to_date, currency), f"{dates.month_start} to {dates.day}"
    if report.estimated_day_cost is not None:
        cost = money(report.estimated_day_cost, currency)
        yield cost, f"{dates.estimated_day} so far, an estimate"
    if not isinstance(report.month_forecast, Missing):
        yield money(report.month_forecast, currency), "forecast for the whole month"


def _request_rows(report: CostReport) -> Iterable[tuple[str, str]]:
    usage = report.usage
    if isinstance(usage, Missing):
        return
    yield f"{usage.num_requests:,}", "requests"
    yield f"{usage.num_input_tokens:,}", "tokens read"
    yield f"{usage.num_output_tokens:,}", "tokens generated"
    for cost, what in (
        (report.cost_per_1000_requests, "per 1,000 requests"),
        (report.cost_per_million_tokens, "per million tokens"),
    ):
        if cost is not None:
            yield money(cost, report.currency, _UNIT_COST_PLACES), what
