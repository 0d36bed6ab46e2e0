"""The report in words and as JSON: nothing lost, nothing that a mail program cannot show."""

import json
from decimal import Decimal
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from app.integrations.aws.cost.checks import check_thresholds
from app.integrations.aws.cost.cost_explorer import CostRow, CostTable, Tag
from app.integrations.aws.cost.dates import ReportDates
from app.integrations.aws.cost.export import to_json
from app.integrations.aws.cost.message import message_of, money, sections_of, subject_of
from app.integrations.aws.cost.report import CostReport, Missing
from app.integrations.aws.cost.usage import Usage
from app.setting_groups.thresholds import parse_thresholds
from tests.support.cost_report import DAY, NOW, TODAY

LARGEST = Decimal("999999999999.99")
AMOUNTS = st.decimals(-LARGEST, LARGEST, places=4)
ROWS = st.lists(
    st.builds(CostRow, st.just(DAY), st.text(max_size=20), st.text(max_size=8), AMOUNTS),
    max_size=30,
)


def report(rows: list[CostRow], **changes: Any) -> CostReport:
    """Return a report of a day's costs."""
    of_day = CostTable(tuple(rows), "USD")
    thresholds = parse_thresholds("100,medium=80")
    values: dict[str, Any] = {
        "dates": ReportDates(DAY, TODAY),
        "made_at": NOW,
        "tag": Tag("Project", "snapkv"),
        "tier_tag_key": "Tier",
        "currency": "USD",
        "of_day": of_day,
        "month_to_date": of_day.total,
        "estimated_day_cost": None,
        "month_forecast": Missing("the month is over"),
        "usage": Usage(1, 0, 1),
        "checks": check_thresholds(thresholds, of_day.total, of_day.by_tier, is_attributed=True),
        "notices": (),
        "num_requests": 2,
    }
    return CostReport(**(values | changes))


@settings(max_examples=50)
@given(ROWS, st.booleans())
@example([CostRow(DAY, "\U0001f600\n", "\u00fc", LARGEST)] * 60, False)
def test_subject_is_what_sns_takes(rows: list[CostRow], is_tagged: bool) -> None:
    """ASCII of at most 100 characters on one line, whatever services and tiers are called."""
    made = report(rows, tag=Tag("\u00dc", "\n") if is_tagged else None)
    subject = subject_of(made)
    assert subject.isascii()
    assert subject.isprintable()
    assert 0 < len(subject) <= 100
    assert subject.startswith("OVER THRESHOLD: ") == made.is_over


@settings(max_examples=50)
@given(ROWS)
def test_every_table_adds_up_to_the_day(rows: list[CostRow]) -> None:
    """What is not shown by name is in the row of the others, but for rounding."""
    made = report(rows)
    for section in sections_of(made):
        if section.title.startswith("By "):
            amounts = [Decimal(figure.split()[0].replace(",", "")) for figure, _ in section.rows]
            assert abs(sum(amounts) - made.of_day.total) <= Decimal("0.005") * len(amounts)
            assert len(amounts) <= 21


@settings(max_examples=50)
@given(ROWS)
def test_json_keeps_every_digit(rows: list[CostRow]) -> None:
    """Amounts are text that is read back as the same number."""
    made = report(rows)
    read = json.loads(json.dumps(to_json(made)))
    assert Decimal(read["cost"]) == made.of_day.total
    by_service = {name: Decimal(cost) for name, cost in read["cost_by_service"].items()}
    assert by_service == made.of_day.by_service
    assert sum(map(Decimal, read["cost_by_tier"].values())) == made.of_day.total
    assert read["missing"] == {"month_forecast": "the month is over"}


def test_message_without_tiers_or_costs_has_no_empty_table() -> None:
    """A title above nothing is noise."""
    assert "By service" not in message_of(report([]))
    assert "By tier" not in message_of(report([CostRow(DAY, "x", "", Decimal(1))]))


def test_small_costs_share_a_row() -> None:
    """Dozens of services cost a fraction of a cent."""
    rows = [CostRow(DAY, f"s{number}", "", Decimal("0.004")) for number in range(3)]
    text = message_of(report([*rows, CostRow(DAY, "large", "", Decimal(5))]))
    assert "5.00 USD  large\n  0.01 USD  3 others" in text
    assert "1 other\n" in message_of(report(rows[:1]))


def test_money_is_written_for_people() -> None:
    """Separators, two digits, and no minus before zero."""
    assert money(Decimal("1234567.891"), "USD") == "1,234,567.89 USD"
    assert money(Decimal("-0.001"), "USD") == "0.00 USD"
    assert money(Decimal("-12.5"), None) == "-12.50"
