"""Cost Explorer over a socket: what it is asked, how pages add up, and every way it can fail."""

import json
from collections import defaultdict
from datetime import date, timedelta
from decimal import Decimal
from typing import Any

import pytest
from botocore.config import Config

from app.integrations.aws.cost.clients import CLIENT_CONFIG, AwsClients
from app.integrations.aws.cost.cost_explorer import CostExplorer, Tag
from app.integrations.aws.cost.errors import CostReportError
from tests.support.cost_explorer import FakeCostExplorer, Fault, LineItem
from tests.support.cost_report import DAY, TODAY, november, shared_clients

FIRST = date(2026, 11, 1)
DECEMBER = date(2026, 12, 1)
TAG = Tag("Project", "snapkv")
COSTS = "GetCostAndUsage"


def explorer(aws: AwsClients | None = None) -> CostExplorer:
    """Return what is tested, with a client of its own."""
    aws = aws or shared_clients()
    return CostExplorer(aws.open("ce", fallback="us-east-1"), "Tier")


def try_three_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let clients try again, as they do outside tests."""
    config = Config(retries={"mode": "standard", "total_max_attempts": 3})
    monkeypatch.setattr("app.integrations.aws.cost.clients.CLIENT_CONFIG", config)


@pytest.mark.usefixtures("aws")
def test_costs_are_those_of_the_bill() -> None:
    """By service and tier, without a cent lost to floats or to other projects."""
    table = explorer().costs(FIRST, TODAY, TAG)
    expected: dict[tuple[date, str, str], Decimal] = defaultdict(Decimal)
    for item in november():
        if item.tags["Project"] == "snapkv":
            expected[item.day, item.service, item.tags.get("Tier", "")] += Decimal(item.amount)
    found = {(row.day, row.service, row.tier): row.amount for row in table.rows}
    assert found == expected
    assert table.currency == "USD"
    of_day = table.between(DAY, DAY)
    assert of_day.total == Decimal("84.084")
    assert list(of_day.by_tier.items()) == [
        ("medium", Decimal("82.427")),
        ("small", Decimal("1.25")),
        ("", Decimal("0.407")),
    ]
    assert next(iter(of_day.by_service)) == "Amazon Elastic Compute Cloud - Compute"


def test_one_request_asks_for_a_month_up_to_a_day_that_is_left_out(aws: FakeCostExplorer) -> None:
    """Requests cost money, and their end is exclusive."""
    asking = explorer()
    table = asking.costs(FIRST, TODAY, TAG)
    assert max(row.day for row in table.rows) == TODAY - timedelta(days=1)
    assert aws.requests == [
        (
            COSTS,
            {
                "TimePeriod": {"Start": "2026-11-01", "End": "2026-11-30"},
                "Granularity": "DAILY",
                "Filter": {"Tags": {"Key": "Project", "Values": ["snapkv"]}},
                "Metrics": ["UnblendedCost"],
                "GroupBy": [
                    {"Type": "DIMENSION", "Key": "SERVICE"},
                    {"Type": "TAG", "Key": "Tier"},
                ],
            },
        )
    ]
    assert asking.num_requests == 1


@pytest.mark.parametrize("page_size", [5, 6, 7, 58, 174, 175])
def test_pages_add_up(aws: FakeCostExplorer, page_size: int) -> None:
    """Wherever pages end, within a day too, each of the 174 groups is counted once."""
    aws.account.page_size = page_size
    asking = explorer()
    assert asking.costs(FIRST, TODAY, TAG).total == Decimal("2100.755")
    assert asking.num_requests == len(aws.requests) == -(-174 // page_size)


def test_pages_without_end_are_given_up(aws: FakeCostExplorer) -> None:
    """A bill for reading the bill has a limit."""
    aws.account.page_size = 1
    with pytest.raises(CostReportError, match="more than 40 pages"):
        explorer().costs(FIRST, TODAY, TAG)
    assert len(aws.requests) == 40


def test_forecast_is_of_the_days_from_today(aws: FakeCostExplorer) -> None:
    """With the same filter as the costs."""
    assert explorer().forecast(TODAY, DECEMBER, TAG) == (Decimal(73), "USD")
    assert aws.asked("GetCostForecast") == [
        {
            "TimePeriod": {"Start": "2026-11-30", "End": "2026-12-01"},
            "Granularity": "DAILY",
            "Filter": {"Tags": {"Key": "Project", "Values": ["snapkv"]}},
            "Metric": "UNBLENDED_COST",
        }
    ]


@pytest.mark.parametrize(
    ("statuses", "may_list", "status"),
    [
        ({"Project": "Active"}, True, "active"),
        ({"Project": "Inactive"}, True, "inactive"),
        ({"Tier": "Active"}, True, "unseen"),
        ({"Project": "Active"}, False, "unreadable"),
    ],
)
def test_status_of_a_tag(
    aws: FakeCostExplorer, statuses: dict[str, str], may_list: bool, status: str
) -> None:
    """A linked account may not know, and that is no failure."""
    aws.account.tag_statuses = statuses
    aws.account.may_list_tags = may_list
    assert explorer().tag_status("Project") == status


def test_several_currencies_are_an_error(aws: FakeCostExplorer) -> None:
    """They cannot be added up."""
    aws.account.bill.append(LineItem(DAY, "x", "1", {"Project": "snapkv"}, unit="CNY"))
    with pytest.raises(CostReportError, match=r"several currencies: \['CNY', 'USD'\]"):
        explorer().costs(FIRST, TODAY, TAG)


def test_nothing_spent_has_no_currency(aws: FakeCostExplorer) -> None:
    """Amounts of zero count as nothing, whatever their unit."""
    aws.account.bill = [LineItem(DAY, "x", "0", {"Project": "snapkv"}, unit="CNY")]
    table = explorer().costs(FIRST, TODAY, TAG)
    assert not table.rows
    assert table.currency is None
    assert table.total == 0


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        ("AccessDeniedException", 400, "denied (AccessDeniedException); the role needs this"),
        ("ThrottlingException", 400, "throttled (ThrottlingException)"),
        ("LimitExceededException", 400, "throttled (LimitExceededException)"),
        ("ExpiredTokenException", 400, "credentials are not accepted (ExpiredTokenException)"),
        ("DataUnavailableException", 400, "no data for it yet (DataUnavailableException)"),
        ("InternalFailure", 500, "failed (InternalFailure)"),
        ("x\ny z\x1b[1m" + "w" * 200, 400, "failed (unknown)"),
    ],
)
def test_refusal_is_one_line_with_its_code_and_without_awss_words(
    aws: FakeCostExplorer, code: str, status: int, words: str
) -> None:
    """AWS's own message may hold the session token."""
    aws.refuse(COSTS, code, status=status)
    with pytest.raises(CostReportError) as caught:
        explorer().costs(FIRST, TODAY, TAG)
    message = str(caught.value)
    assert message.startswith("ce:GetCostAndUsage: ")
    assert words in message
    assert "\n" not in message
    assert len(message) < 160
    assert "secret" not in message
    assert caught.value.__suppress_context__
    assert caught.value.__cause__ is None


def test_throttling_is_tried_again_and_each_try_is_counted(
    aws: FakeCostExplorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A passing fault costs a request, not the report."""
    try_three_times(monkeypatch)
    aws.refuse(COSTS, "ThrottlingException")
    asking = explorer(AwsClients())
    assert asking.costs(FIRST, TODAY, TAG).total == Decimal("2100.755")
    assert asking.num_requests == 2


def test_answer_that_does_not_come_is_given_up(
    aws: FakeCostExplorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call ends within a time that is known."""
    config = Config(read_timeout=0.1, retries={"total_max_attempts": 1})
    monkeypatch.setattr("app.integrations.aws.cost.clients.CLIENT_CONFIG", config)
    asking = explorer(AwsClients())
    for operation, ask in ((COSTS, asking.costs), ("GetCostForecast", asking.forecast)):
        aws.faults[operation].append(Fault(is_stalled=True))
        with pytest.raises(CostReportError, match=f"^ce:{operation}: did not answer in time"):
            ask(FIRST, TODAY, TAG)
    assert (CLIENT_CONFIG.connect_timeout, CLIENT_CONFIG.read_timeout) == (3, 15)
    assert CLIENT_CONFIG.retries == {"mode": "standard", "total_max_attempts": 3}


def test_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network without a way out is named."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_COST_EXPLORER", "http://127.0.0.1:9")
    with pytest.raises(CostReportError, match="cannot be reached"):
        explorer().costs(FIRST, TODAY, TAG)


@pytest.mark.usefixtures("aws")
def test_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commonest mistake on a new machine."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(CostReportError, match="found no AWS credentials"):
        explorer(AwsClients()).costs(FIRST, TODAY, TAG)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("AWS_ENDPOINT_URL_COST_EXPLORER", "nonsense", "is unusable"),
        ("AWS_DEFAULT_REGION", "no region!", "is unusable"),
        ("AWS_PROFILE", "nobody", "ProfileNotFound"),
    ],
)
def test_unusable_configuration(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: str
) -> None:
    """What the SDK cannot start with is an error of the report as well."""
    monkeypatch.setenv(name, value)
    with pytest.raises(CostReportError, match=words):
        explorer(AwsClients())


def answer(**changes: Any) -> bytes:
    """Return an answer of one group, with some of it changed."""
    values = {
        "day": "2026-11-28",
        "keys": ["x", "Tier$"],
        "metrics": {"UnblendedCost": {"Amount": "1", "Unit": "USD"}},
    } | changes
    group = {"Keys": values["keys"], "Metrics": values["metrics"]}
    result = {"TimePeriod": {"Start": values["day"], "End": "2026-11-29"}, "Groups": [group]}
    return json.dumps({"ResultsByTime": [result]}).encode()


def money(amount: object, unit: str = "USD") -> dict[str, Any]:
    """Return the metrics of a group."""
    return {"UnblendedCost": {"Amount": amount, "Unit": unit}}


GARBAGE = {
    "nothing": b"",
    "a page": b"<html>busy</html>",
    "no object": b"[1]",
    "no results": b"{}",
    "null": b'{"ResultsByTime": null}',
    "text for a list": b'{"ResultsByTime": "x"}',
    "broken text": b"\xff\xfe\x00",
    "too deep": b'{"a":' * 100_000,
    "no day": answer(day="x"),
    "another day": answer(day="2026-12-24"),
    "no tier": answer(keys=["x"]),
    "another tag": answer(keys=["x", "Stage$a"]),
    "no metrics": answer(metrics={}),
    "no amount": answer(metrics=money("x")),
    "no number": answer(metrics=money("NaN")),
    "endless": answer(metrics=money("Infinity")),
    "too much": answer(metrics=money("1E+400")),
    "no currency": answer(metrics=money("1", "N/A")),
    "currency of lines": answer(metrics=money("1", "US\n")),
    "amount of lists": answer(metrics=money([])),
}


@pytest.mark.parametrize("body", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_is_an_error_and_no_report(aws: FakeCostExplorer, body: bytes) -> None:
    """Whatever comes instead of costs, it is not taken for costs."""
    aws.faults[COSTS].append(Fault(body=body))
    with pytest.raises(CostReportError, match=r"^ce:GetCostAndUsage: ") as caught:
        explorer().costs(FIRST, TODAY, TAG)
    assert "\n" not in str(caught.value)


def test_a_sane_answer_is_taken(aws: FakeCostExplorer) -> None:
    """The garbage above is refused for what is wrong with it, not for its frame."""
    aws.faults[COSTS].append(Fault(body=answer()))
    assert explorer().costs(FIRST, TODAY, TAG).total == 1


@pytest.mark.parametrize("region", ["ap-northeast-1", "eu-west-1", "us-east-1"])
def test_requests_go_to_the_one_endpoint_of_the_partition(
    monkeypatch: pytest.MonkeyPatch, region: str
) -> None:
    """Cost Explorer has no endpoint in Tokyo; the SDK knows where it is."""
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setenv("AWS_DEFAULT_REGION", region)
    client = AwsClients().open("ce", fallback="us-east-1")
    sent: list[Any] = []

    def keep(request: Any, **_: object) -> Any:
        sent.append(request)
        raise ConnectionRefusedError

    client.meta.events.register("before-send.cost-explorer", keep)
    with pytest.raises(ConnectionRefusedError):
        client.list_cost_allocation_tags()
    assert sent[0].url.startswith("https://ce.us-east-1.")
    assert "/us-east-1/ce/aws4_request" in sent[0].headers["Authorization"].decode()
