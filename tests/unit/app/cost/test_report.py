"""The report as a whole: figures worked out by hand, and what is missing when a part fails."""

from datetime import date
from decimal import Decimal
from typing import Any

import pytest

from app.integrations.aws.cost.dates import ReportDates
from app.integrations.aws.cost.errors import CostReportError
from app.integrations.aws.cost.message import message_of
from app.integrations.aws.cost.report import CostReport, Missing, make_report
from app.integrations.aws.cost.usage import Usage
from app.setting_groups.aws import AwsSettings
from tests.support.cost_explorer import FakeCostExplorer, Fault, LineItem
from tests.support.cost_report import (
    DAY,
    NOW,
    TODAY,
    YESTERDAY,
    log_requests,
    november,
    shared_clients,
)

NO_LOG = (
    "dynamodb:Query: there is no table nowhere with an index by_day of the key day and both "
    "numbers of tokens"
)
COSTS, FORECAST, TAGS = "GetCostAndUsage", "GetCostForecast", "ListCostAllocationTags"


def report(day: date = DAY, today: date = TODAY, **settings: Any) -> CostReport:
    """Make the report that is tested."""
    return make_report(shared_clients(), AwsSettings(**settings), ReportDates(day, today), NOW)


def test_figures_are_those_worked_out_by_hand(aws: FakeCostExplorer, request_log: str) -> None:
    """The day, the month so far, the whole month, and the price of requests and tokens."""
    log_requests(request_log, DAY, 40, input_tokens=5_000, output_tokens=250)
    log_requests(request_log, YESTERDAY, 3, input_tokens=1, output_tokens=1)
    made = report(request_log_table=request_log, cost_daily_threshold="80,medium=90,small=1.25")
    assert made.of_day.total == Decimal("84.084")
    assert made.month_to_date == 27 * Decimal("73.082") + Decimal("84.084")
    assert made.estimated_day_cost == Decimal("43.457")
    assert made.month_forecast == Decimal("2100.755") + 73
    assert made.usage == Usage(40, 200_000, 10_000)
    assert made.cost_per_1000_requests == Decimal("2102.1")
    assert made.cost_per_million_tokens == Decimal("400.4")
    assert [check.verdict for check in made.checks] == ["over", "within", "unknown"]
    assert made.is_over
    assert made.currency == "USD"
    assert made.notices == ()
    asked = [body["Filter"]["Tags"]["Values"] for _, body in aws.requests]
    assert asked == [["snapkv"], ["snapkv"]]
    assert made.num_requests == len(aws.requests) == 2


@pytest.mark.usefixtures("aws")
def test_below_every_threshold_and_without_any() -> None:
    """A day is marked for a reason only."""
    assert not report(cost_daily_threshold="84.084").is_over
    assert report(cost_daily_threshold="84.083").is_over
    assert report().checks == ()


@pytest.mark.usefixtures("aws")
def test_yesterday_is_marked_as_an_estimate() -> None:
    """Its cost is not complete, whoever asks for it."""
    made = report(YESTERDAY)
    assert made.of_day.total == Decimal("43.457")
    assert made.estimated_day_cost is None
    assert "43.46 USD so far, an estimate" in message_of(made)
    assert "a day is complete two days later" in message_of(made)


@pytest.mark.parametrize(
    ("statuses", "may_list", "part"),
    [
        ({"Project": "Inactive"}, True, "is not activated for cost allocation. In the payer"),
        ({}, True, "AWS has not seen the tag Project on any resource yet"),
        ({}, False, "only the payer account can see"),
    ],
)
def test_without_activated_tag_the_account_is_reported_and_what_to_do(
    aws: FakeCostExplorer, statuses: dict[str, str], may_list: bool, part: str
) -> None:
    """The first days of every installation: the tag finds nothing."""
    aws.account.tag_statuses = statuses
    aws.account.may_list_tags = may_list
    made = report(cost_daily_threshold="100,medium=500", request_log_table="requests")
    assert made.tag is None
    assert made.of_day.total == Decimal("284.084")
    assert made.month_forecast == 29 * 200 + Decimal("2100.755") + 73
    assert "Filter" not in aws.asked(FORECAST)[0]
    # 200 of the 284 are another project's, so nobody is alarmed and nothing is divided.
    assert [check.verdict for check in made.checks] == ["unknown", "within"]
    assert not made.is_over
    assert isinstance(made.usage, Missing)
    (notice,) = made.notices
    assert part in notice
    if "payer" in notice:
        assert "aws ce update-cost-allocation-tags-status" in notice
        assert "TagKey=Project,Status=Active" in notice
        assert "24 hours" in notice
        assert "does not reach back" in notice
    assert made.num_requests == len(aws.requests) == 4
    text = message_of(made)
    assert "the whole account: 284.08 USD" in text
    assert notice in text


@pytest.mark.usefixtures("aws")
def test_activated_tag_that_no_resource_carries() -> None:
    """Then activating it is not the advice."""
    made = report(cost_tag_value="snapkv-eu")
    (notice,) = made.notices
    assert "no resource carries Project=snapkv-eu" in notice
    assert "aws ce update" not in notice
    assert made.tag is None


def test_day_without_costs_in_a_month_with_some_is_pointed_out(aws: FakeCostExplorer) -> None:
    """A tag that was activated in the middle of the month does not reach back."""
    aws.account.bill = [item for item in november() if item.day == YESTERDAY]
    made = report()
    assert made.of_day.total == 0
    assert "No cost of 2026-11-28 carries Project=snapkv, though other days" in made.notices[0]


@pytest.mark.usefixtures("aws")
def test_threshold_of_a_tier_that_costs_nothing_is_pointed_out() -> None:
    """A misspelled tier would otherwise be within its threshold for ever."""
    made = report(cost_daily_threshold="medum=50")
    assert [check.verdict for check in made.checks] == ["within"]
    assert "No cost of this month carries Tier=medum" in made.notices[0]


def test_tier_tag_that_is_not_activated_leaves_tiers_unknown(aws: FakeCostExplorer) -> None:
    """Everything may be that tier's, so only a cost below its threshold is within it."""
    aws.account.tag_statuses = {"Project": "Active", "Tier": "Inactive"}
    made = report(cost_daily_threshold="medium=50,large=100")
    assert [check.verdict for check in made.checks] == ["unknown", "within"]
    assert len(made.notices) == 2
    assert "that the tag Tier is activated" in made.notices[0]


def test_nothing_at_all_was_spent(aws: FakeCostExplorer) -> None:
    """A new account has a report of zero, with no currency to show."""
    aws.account.bill = []
    aws.account.forecast_per_day = None
    made = report(cost_daily_threshold="10")
    assert made.of_day.total == 0
    assert made.currency is None
    assert not made.is_over
    assert "Project=snapkv: 0.00\n" in message_of(made)


def test_too_little_history_is_no_forecast_and_no_failure(aws: FakeCostExplorer) -> None:
    """AWS needs weeks before it forecasts."""
    aws.account.forecast_per_day = None
    made = report()
    assert isinstance(made.month_forecast, Missing)
    assert "no data for it yet (DataUnavailableException)" in made.month_forecast.reason
    assert "No forecast: ce:GetCostForecast: AWS has no data" in message_of(made)
    assert made.of_day.total == Decimal("84.084")


@pytest.mark.parametrize(
    ("fault", "part"),
    [
        (Fault(400, b'{"__type":"AccessDeniedException"}'), "denied"),
        (Fault(400, b'{"__type":"ThrottlingException"}'), "throttled"),
        (Fault(body=b"<html>"), "cannot be understood"),
    ],
    ids=["denied", "throttled", "garbage"],
)
def test_report_stands_without_its_forecast(aws: FakeCostExplorer, fault: Fault, part: str) -> None:
    """However the forecast fails, the day's cost is told."""
    aws.faults[FORECAST].append(fault)
    made = report()
    assert isinstance(made.month_forecast, Missing)
    assert part in made.month_forecast.reason
    assert made.of_day.total == Decimal("84.084")


@pytest.mark.parametrize("today", [date(2026, 12, 1), date(2026, 12, 2), date(2027, 1, 15)])
def test_a_month_that_is_over_is_not_forecast(aws: FakeCostExplorer, today: date) -> None:
    """No request is paid for, and none asks beyond the month."""
    aws.account.today = today
    made = report(date(2026, 11, 29), today)
    assert made.month_forecast == Missing("the month is over")
    assert [body["TimePeriod"]["End"] for body in aws.asked(COSTS)] == ["2026-12-01"]
    assert aws.asked(FORECAST) == []


def test_last_day_of_a_leap_february(aws: FakeCostExplorer) -> None:
    """On 1 March the 28th is reported, the 29th is yesterday, and the month is over."""
    tags = {"Project": "snapkv"}
    aws.account.bill = [LineItem(date(2028, 2, day), "x", f"{day}", tags) for day in range(1, 30)]
    aws.account.today = date(2028, 3, 1)
    made = report(date(2028, 2, 28), date(2028, 3, 1))
    assert made.of_day.total == 28
    assert made.month_to_date == sum(range(1, 29))
    assert made.estimated_day_cost == 29


def test_forecast_in_another_currency_is_an_error(aws: FakeCostExplorer) -> None:
    """It cannot be added to the costs."""
    aws.account.bill = [
        LineItem(item.day, item.service, item.amount, item.tags, "CNY") for item in november()
    ]
    with pytest.raises(CostReportError, match="costs are in CNY, their forecast in USD"):
        report()


def test_without_costs_there_is_no_report(aws: FakeCostExplorer) -> None:
    """A report of zero would be a lie."""
    aws.refuse(COSTS, "AccessDeniedException")
    with pytest.raises(CostReportError, match="GetCostAndUsage: denied"):
        report()


@pytest.mark.usefixtures("aws")
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "no request log is named (SNAPKV_REQUEST_LOG_TABLE)"),
        ({"request_log_table": "nowhere"}, NO_LOG),
        ({"request_log_table": "x-y", "request_log_ttl_days": 2}, "the request log keeps 2 days"),
    ],
)
def test_report_stands_without_the_request_log(settings: dict[str, Any], reason: str) -> None:
    """It says why there is no cost per request."""
    made = report(**settings)
    assert made.usage == Missing(reason)
    assert f"No cost per request: {reason}." in message_of(made)
    assert made.cost_per_1000_requests is None


@pytest.mark.usefixtures("aws")
def test_a_day_without_requests_divides_by_nothing(request_log: str) -> None:
    """A service that nobody used still cost something."""
    made = report(request_log_table=request_log)
    assert made.usage == Usage(0, 0, 0)
    assert (made.cost_per_1000_requests, made.cost_per_million_tokens) == (None, None)
    assert "0  requests" in message_of(made)
