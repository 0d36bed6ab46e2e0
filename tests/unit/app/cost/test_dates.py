"""The days of a report, against a calendar that is walked day by day."""

from datetime import date, timedelta

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from app.integrations.aws.cost.dates import ReportDates, parse_day

DAYS = st.dates(min_value=date(2000, 1, 3), max_value=date(2100, 1, 1))
LEAP_DAY = date(2028, 2, 29)
LAST_OF_YEAR = date(2026, 12, 31)


def month_of(day: date) -> list[date]:
    """List the month's days by going back and forth one day at a time."""
    days = [day]
    while (days[0] - timedelta(days=1)).month == day.month:
        days.insert(0, days[0] - timedelta(days=1))
    while (days[-1] + timedelta(days=1)).month == day.month:
        days.append(days[-1] + timedelta(days=1))
    return days


@given(DAYS, st.integers(1, 800))
@example(LEAP_DAY, 1)
@example(LEAP_DAY - timedelta(days=1), 1)
@example(date(2027, 2, 28), 1)
@example(LAST_OF_YEAR, 1)
@example(LAST_OF_YEAR, 2)
@example(date(2026, 12, 30), 1)
def test_month_and_what_is_known_of_it(day: date, age: int) -> None:
    """Every period is the days that a calendar has, wherever in month and year they lie."""
    today = day + timedelta(days=age)
    dates = ReportDates(day, today)
    month = month_of(day)
    assert dates.month_start == month[0]
    assert dates.month_end == month[-1] + timedelta(days=1)
    known = [other for other in month if other < today]
    assert dates.known_end == known[-1] + timedelta(days=1)
    assert day in known
    assert dates.is_month_over == (known == month)
    assert dates.is_settled == (age > 1)
    estimated = [other for other in known if other > day and (today - other).days == 1]
    assert dates.estimated_day == (estimated[0] if estimated else None)


@given(DAYS)
@example(date(2028, 3, 1))
@example(date(2027, 1, 1))
def test_latest_settled_day_is_the_one_before_yesterday(today: date) -> None:
    """Yesterday's cost is not complete, whatever month it was in."""
    dates = ReportDates.latest_settled(today)
    assert dates.is_settled
    assert not ReportDates(dates.day + timedelta(days=1), today).is_settled


@given(DAYS, st.integers(0, 800))
def test_days_that_are_not_over_are_refused(today: date, ahead: int) -> None:
    """There is no cost of today or tomorrow to report."""
    with pytest.raises(ValueError, match="is not over"):
        ReportDates(today + timedelta(days=ahead), today)


@given(st.dates())
def test_day_is_read_as_it_is_written(day: date) -> None:
    """Years of four digits, months and days of two."""
    assert parse_day(day.isoformat()) == day


@pytest.mark.parametrize(
    "text",
    ["", "yesterday", "2026-02-29", "2026-13-01", "20261128", "2026-W48-6", "28.11.2026", 20261128],
)
def test_other_ways_to_write_a_day_are_refused(text: str) -> None:
    """A date that can be misread is worse than an error."""
    with pytest.raises(ValueError, match="such as 2026-11-28"):
        parse_day(text)
