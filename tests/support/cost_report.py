"""What tests of the cost report share: a month's bill, a request log, a topic and its reader."""

import functools
import json
import uuid
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Any, Final

import boto3

from app.integrations.aws.cost.clients import AwsClients
from tests.support.cost_explorer import Account, LineItem

NOW: Final = datetime(2026, 11, 30, 0, 15, tzinfo=UTC)
TODAY: Final = date(2026, 11, 30)
YESTERDAY: Final = date(2026, 11, 29)
#: The day that is reported when none is named.
DAY: Final = date(2026, 11, 28)
ACTIVE: Final = {"Project": "Active", "Tier": "Active"}
_BATCH: Final = 25

_COMPUTE: Final = "Amazon Elastic Compute Cloud - Compute"
_OURS: Final = {"Project": "snapkv"}


def november() -> list[LineItem]:
    """Return the bill of 1 to 29 November: 73.082 USD a day, on the 28th 84.084, then 43.457.

    Another project's database is in it as well, for 200 USD a day.
    """
    bill = []
    for number in range(1, 30):
        day = date(2026, 11, number)
        compute = {DAY: "71.127", YESTERDAY: "30.5"}.get(day, "60.125")
        bill += [
            LineItem(day, _COMPUTE, compute, _OURS | {"Tier": "medium"}),
            LineItem(day, "Amazon ElastiCache", "11.3", _OURS | {"Tier": "medium"}),
            LineItem(day, "AWS Lambda", "1.25", _OURS | {"Tier": "small"}),
            LineItem(day, "Amazon Simple Storage Service", "0.4", _OURS),
            LineItem(day, "AmazonCloudWatch", "0.004", _OURS),
            LineItem(day, "AWS Key Management Service", "0.003", _OURS),
            LineItem(day, "Amazon Relational Database Service", "200", {"Project": "other"}),
        ]
    return bill


def november_account(**changes: Any) -> Account:
    """Return the account with that bill and activated tags, as it is on 30 November."""
    values = {"tag_statuses": dict(ACTIVE), "forecast_per_day": "73"}
    return Account(TODAY, november(), **(values | changes))


def create_request_log(*, has_index: bool = True) -> str:
    """Create a request log like the service's and return its name."""
    name = f"requests-{uuid.uuid4()}"
    index = {
        "IndexName": "by_day",
        "KeySchema": [
            {"AttributeName": "day", "KeyType": "HASH"},
            {"AttributeName": "started_at", "KeyType": "RANGE"},
        ],
        "Projection": {
            "ProjectionType": "INCLUDE",
            "NonKeyAttributes": ["input_tokens", "output_tokens"],
        },
    }
    keys = ["request_id", "day", "started_at"] if has_index else ["request_id"]
    boto3.client("dynamodb").create_table(
        TableName=name,
        BillingMode="PAY_PER_REQUEST",
        AttributeDefinitions=[{"AttributeName": key, "AttributeType": "S"} for key in keys],
        KeySchema=[{"AttributeName": "request_id", "KeyType": "HASH"}],
        **({"GlobalSecondaryIndexes": [index]} if has_index else {}),
    )
    return name


def log_requests(
    table: str, day: date, count: int, *, input_tokens: int, output_tokens: int, **more: str
) -> None:
    """Write items like the service's, `more` being further attributes."""
    client = boto3.client("dynamodb")
    for start in range(0, count, _BATCH):
        puts = []
        for number in range(start, min(count, start + _BATCH)):
            item = {
                "request_id": {"S": str(uuid.uuid4())},
                "day": {"S": day.isoformat()},
                "started_at": {"S": f"{day}T00:00:00.{number:06}+00:00"},
                "input_tokens": {"N": str(input_tokens)},
                "output_tokens": {"N": str(output_tokens)},
                **{name: {"S": value} for name, value in more.items()},
            }
            puts.append({"PutRequest": {"Item": item}})
        client.batch_write_item(RequestItems={table: puts})


@dataclass(frozen=True, slots=True)
class Topic:
    """An SNS topic and the queue of a subscriber."""

    arn: str
    queue_url: str

    def received(self) -> list[dict[str, Any]]:
        """Return what was published since the last call, as the subscriber sees it."""
        answer = boto3.client("sqs").receive_message(
            QueueUrl=self.queue_url, MaxNumberOfMessages=10, WaitTimeSeconds=0
        )
        return [json.loads(message["Body"]) for message in answer.get("Messages", [])]


def create_topic() -> Topic:
    """Create a topic with one subscriber."""
    name = f"snapkv-alerts-{uuid.uuid4()}"
    sns, sqs = boto3.client("sns"), boto3.client("sqs")
    arn = sns.create_topic(Name=name)["TopicArn"]
    queue_url = sqs.create_queue(QueueName=name)["QueueUrl"]
    attributes = sqs.get_queue_attributes(QueueUrl=queue_url, AttributeNames=["QueueArn"])
    queue_arn = attributes["Attributes"]["QueueArn"]
    sns.subscribe(TopicArn=arn, Protocol="sqs", Endpoint=queue_arn)
    return Topic(arn, queue_url)


@functools.cache
def shared_clients() -> AwsClients:
    """Return clients for tests that change nothing about credentials or region.

    Endpoints are looked up again for each client.
    """
    return AwsClients()
