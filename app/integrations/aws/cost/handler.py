"""The Lambda function that sends the report once a day.

It is packed without PyTorch and without the rest of the service (docs/cost-report.md), so it must
import neither `snapkv_core` nor `app.settings`.
"""

import logging
from collections.abc import Mapping
from datetime import UTC, date, datetime
from typing import Any, Final

from pydantic_settings import BaseSettings, SettingsConfigDict

from app.integrations.aws.cost.clients import AwsClients
from app.integrations.aws.cost.dates import ReportDates, parse_day, utc_now
from app.integrations.aws.cost.errors import CostReportError
from app.integrations.aws.cost.export import to_json
from app.integrations.aws.cost.publish import publish
from app.integrations.aws.cost.report import make_report
from app.setting_groups.aws import AwsSettings

_logger: Final = logging.getLogger(__name__)


class CostSettings(AwsSettings, BaseSettings):
    """The settings of the report, from the same `SNAPKV_*` variables as the service's."""

    model_config = SettingsConfigDict(
        env_prefix="SNAPKV_", env_ignore_empty=True, extra="ignore", frozen=True
    )


def handler(event: Mapping[str, Any], context: object) -> dict[str, Any]:
    """Make the report and publish it, whatever it says.

    Publishing comes last: an invocation that failed has sent nothing and may be tried again, and
    the scheduled time in the event makes it the report of the same day even after midnight.

    Args:
        event: That of EventBridge, whose `time` is the scheduled time; `{"day": "2026-11-28"}`
            asks for a day by hand.
        context: Lambda's; not used.

    Returns:
        The report as JSON values.

    Raises:
        CostReportError: No topic is named, the event names no day that is over, or AWS fails.
    """
    del context
    settings = CostSettings()
    if settings.cost_topic_arn is None:
        raise CostReportError("SNAPKV_COST_TOPIC_ARN: must name the topic that gets the report")
    now = utc_now()
    aws = AwsClients()
    report = make_report(aws, settings, _dates(event, now.date()), now)
    message_id = publish(aws, report, settings.cost_topic_arn)
    _logger.info(
        "cost_report_sent",
        extra={
            "report_day": report.dates.day.isoformat(),
            "over_threshold": report.is_over,
            "message_id": message_id,
        },
    )
    return to_json(report)


def _dates(event: Mapping[str, Any], today: date) -> ReportDates:
    try:
        if "day" in event:
            return ReportDates(parse_day(event["day"]), today)
        scheduled = today
        if "time" in event:
            scheduled = datetime.fromisoformat(event["time"]).astimezone(UTC).date()
        return ReportDates(ReportDates.latest_settled(scheduled).day, today)
    except (TypeError, ValueError) as error:
        raise CostReportError(f"event: {error}") from None
