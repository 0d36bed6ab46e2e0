"""Makes the report of a day: what it cost, against which threshold, and for how many requests."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Final

from app.integrations.aws.cost.checks import ThresholdCheck, check_thresholds
from app.integrations.aws.cost.clients import AwsClients
from app.integrations.aws.cost.cost_explorer import (
    FALLBACK_REGION,
    CostExplorer,
    CostTable,
    Tag,
)
from app.integrations.aws.cost.dates import ReportDates
from app.integrations.aws.cost.errors import CostReportError
from app.integrations.aws.cost.notices import day_notice, tag_notice, tier_notice
from app.integrations.aws.cost.usage import Usage, read_usage
from app.setting_groups.aws import AwsSettings

#: Price of one Cost Explorer request, in every region.
USD_PER_REQUEST: Final = Decimal("0.01")


@dataclass(frozen=True, slots=True)
class Missing:
    """A part that the report does not have, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class CostReport:
    """A day's costs. Amounts are exact, in `currency`.

    Attributes:
        dates: The day, and what can be known of it.
        made_at: When the report was made.
        tag: Tag that the costs carry; None when they are the whole account's.
        tier_tag_key: Tag that names the tier.
        currency: Currency of all amounts; None when nothing cost anything.
        of_day: Costs of the day.
        month_to_date: Cost of the month's days up to the day, that one included.
        estimated_day_cost: Cost so far of yesterday; None when that is the day itself or in
            another month.
        month_forecast: Cost of the whole month: what is known, and what is forecast for the rest.
        usage: Requests of the day.
        checks: Thresholds and what became of them.
        notices: What has to be done before the report can say more.
        num_requests: Cost Explorer requests that the report took.
    """

    dates: ReportDates
    made_at: datetime
    tag: Tag | None
    tier_tag_key: str
    currency: str | None
    of_day: CostTable
    month_to_date: Decimal
    estimated_day_cost: Decimal | None
    month_forecast: Decimal | Missing
    usage: Usage | Missing
    checks: tuple[ThresholdCheck, ...]
    notices: tuple[str, ...]
    num_requests: int

    @property
    def is_over(self) -> bool:
        """Whether the day is above a threshold."""
        return any(check.verdict == "over" for check in self.checks)

    @property
    def cost_per_1000_requests(self) -> Decimal | None:
        """Cost of the day by its requests; None without any."""
        if isinstance(self.usage, Missing) or not self.usage.num_requests:
            return None
        return self.of_day.total * 1000 / self.usage.num_requests

    @property
    def cost_per_million_tokens(self) -> Decimal | None:
        """Cost of the day by its tokens, read and generated; None without any."""
        if isinstance(self.usage, Missing) or not self.usage.num_tokens:
            return None
        return self.of_day.total * 1_000_000 / self.usage.num_tokens


@dataclass(frozen=True, slots=True)
class _Costs:
    """Costs of the month, whose they are, and what to do when they are not the service's."""

    month: CostTable
    tag: Tag | None
    notices: tuple[str, ...]


def make_report(
    aws: AwsClients, settings: AwsSettings, dates: ReportDates, made_at: datetime
) -> CostReport:
    """Ask AWS and put the report together; blocking.

    It takes two requests to Cost Explorer, and up to four when the tag finds nothing.

    Raises:
        CostReportError: Cost Explorer gives no costs. What else cannot be had is missing in the
            report, with the reason.
    """
    client = aws.open("ce", fallback=FALLBACK_REGION)
    explorer = CostExplorer(client, settings.cost_tier_tag_key)
    tag = Tag(settings.cost_tag_key, settings.cost_tag_value)
    costs = _costs(explorer, dates, tag)
    month, of_day = costs.month, costs.month.between(dates.day, dates.day)
    is_attributed = costs.tag is not None
    forecast, currency = _month_forecast(explorer, dates, costs)
    estimated_day = dates.estimated_day
    return CostReport(
        dates=dates,
        made_at=made_at,
        tag=costs.tag,
        tier_tag_key=settings.cost_tier_tag_key,
        currency=currency,
        of_day=of_day,
        month_to_date=month.between(dates.month_start, dates.day).total,
        estimated_day_cost=(
            month.between(estimated_day, estimated_day).total if estimated_day else None
        ),
        month_forecast=forecast,
        usage=_usage(aws, settings, dates)
        if is_attributed
        else Missing("the service's share of the cost is unknown"),
        checks=check_thresholds(
            settings.cost_thresholds(), of_day.total, of_day.by_tier, is_attributed=is_attributed
        ),
        notices=costs.notices + _notices(settings, costs, of_day, dates),
        num_requests=explorer.num_requests,
    )


def _costs(explorer: CostExplorer, dates: ReportDates, tag: Tag) -> _Costs:
    """Return the costs of the tag or, when it finds none, the whole account's."""
    tagged = explorer.costs(dates.month_start, dates.known_end, tag)
    if tagged.rows:
        return _Costs(tagged, tag, ())
    account = explorer.costs(dates.month_start, dates.known_end, None)
    if not account.rows:
        return _Costs(tagged, tag, ())
    return _Costs(account, None, (tag_notice(tag, explorer.tag_status(tag.key)),))


def _notices(
    settings: AwsSettings, costs: _Costs, of_day: CostTable, dates: ReportDates
) -> tuple[str, ...]:
    """Return what looks like a mistake in the tags of costs that are the service's."""
    if costs.tag is None:
        return ()
    notices = [
        tier_notice(tier, settings.cost_tier_tag_key)
        for tier in settings.cost_thresholds().by_tier
        if tier not in costs.month.by_tier
    ]
    if costs.month.rows and not of_day.rows:
        notices.insert(0, day_notice(costs.tag, dates.day))
    return tuple(notices)


def _month_forecast(
    explorer: CostExplorer, dates: ReportDates, costs: _Costs
) -> tuple[Decimal | Missing, str | None]:
    """Return what the whole month will cost, and the currency of the report."""
    known = costs.month
    if dates.is_month_over:
        return Missing("the month is over"), known.currency
    try:
        rest, currency = explorer.forecast(dates.today, dates.month_end, costs.tag)
    except CostReportError as error:
        return Missing(str(error)), known.currency
    if known.currency not in (None, currency):
        raise CostReportError(f"costs are in {known.currency}, their forecast in {currency}")
    return known.total + rest, currency


def _usage(aws: AwsClients, settings: AwsSettings, dates: ReportDates) -> Usage | Missing:
    table, kept_days = settings.request_log_table, settings.request_log_ttl_days
    if table is None:
        return Missing("no request log is named (SNAPKV_REQUEST_LOG_TABLE)")
    if dates.day + timedelta(days=kept_days) <= dates.today:
        return Missing(f"the request log keeps {kept_days} days")
    try:
        return read_usage(aws, table, dates.day)
    except CostReportError as error:
        return Missing(str(error))
