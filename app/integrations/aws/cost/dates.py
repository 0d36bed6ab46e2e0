"""The days of a report. Cost Explorer counts UTC days and leaves the end of a period out."""

from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Final

#: Cost Explorer learns of a day's usage during the day after it: yesterday's cost is incomplete.
SETTLED_AFTER_DAYS: Final = 2
_LONGEST_MONTH_DAYS: Final = 31


def utc_now() -> datetime:
    """Return the time, with its zone."""
    return datetime.now(tz=UTC)


def parse_day(text: str) -> date:
    """Read a day written as `2026-11-28`.

    Raises:
        ValueError: It is written in another way, or there is no such day.
    """
    try:
        day = date.fromisoformat(text)
    except (TypeError, ValueError):
        day = None
    if day is None or day.isoformat() != text:
        raise ValueError(f"must be a day such as 2026-11-28, got {text!r}")
    return day


@dataclass(frozen=True, slots=True)
class ReportDates:
    """A day, the month it belongs to, and what can be known of both today.

    Attributes:
        day: The day that is reported.
        today: The day on which the report is made.

    Raises:
        ValueError: The day is not over.
    """

    day: date
    today: date

    def __post_init__(self) -> None:
        if self.day >= self.today:
            raise ValueError(f"{self.day} is not over: days are UTC, and today is {self.today}")

    @classmethod
    def latest_settled(cls, today: date) -> "ReportDates":
        """Return the dates of the last day whose cost is complete."""
        return cls(today - timedelta(days=SETTLED_AFTER_DAYS), today)

    @property
    def month_start(self) -> date:
        """First day of the month."""
        return self.day.replace(day=1)

    @property
    def month_end(self) -> date:
        """First day after the month."""
        # From a first, 31 days lead into the next month and never past it.
        return (self.month_start + timedelta(days=_LONGEST_MONTH_DAYS)).replace(day=1)

    @property
    def known_end(self) -> date:
        """First day of which nothing is known: today, or the end of a month that is over."""
        return min(self.month_end, self.today)

    @property
    def is_month_over(self) -> bool:
        """Whether nothing is left to forecast."""
        return self.today >= self.month_end

    @property
    def is_settled(self) -> bool:
        """Whether the day's cost is complete."""
        return self.day + timedelta(days=SETTLED_AFTER_DAYS) <= self.today

    @property
    def estimated_day(self) -> date | None:
        """Yesterday, if it is another day of the same month; its cost is incomplete."""
        yesterday = self.today - timedelta(days=1)
        return yesterday if self.day < yesterday < self.known_end else None
