"""Sends the report to an SNS topic."""

from typing import Any, Final

from app.integrations.aws.cost.clients import AwsClients
from app.integrations.aws.cost.errors import aws_call
from app.integrations.aws.cost.message import message_of, subject_of
from app.integrations.aws.cost.report import CostReport

_FIFO: Final = ".fifo"
_GROUP: Final = "snapkv-cost"


def publish(aws: AwsClients, report: CostReport, topic_arn: str) -> str:
    """Publish the report; blocking.

    The day and the mark are attributes too, so that a subscription may filter by them and a
    receiver can tell a second report of the same day.

    Args:
        aws: Opens the client.
        report: The report.
        topic_arn: Topic to publish to, in any region.

    Returns:
        SNS's id of the message.

    Raises:
        CostReportError: It cannot be published.
    """
    day = report.dates.day.isoformat()
    request: dict[str, Any] = {
        "TopicArn": topic_arn,
        "Subject": subject_of(report),
        "Message": message_of(report),
        "MessageAttributes": {
            "report_day": {"DataType": "String", "StringValue": day},
            "over_threshold": {"DataType": "String", "StringValue": str(report.is_over).lower()},
        },
    }
    if topic_arn.endswith(_FIFO):
        # Such a topic drops what it was sent again within five minutes.
        request |= {"MessageGroupId": _GROUP, "MessageDeduplicationId": f"{_GROUP}-{day}"}
    client = aws.open("sns", region=topic_arn.split(":")[3])
    with aws_call("sns:Publish"):
        return str(client.publish(**request)["MessageId"])
