"""Counts a day's requests and tokens in the request log."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from typing import Any, Final

from app.integrations.aws.cost.clients import AwsClients
from app.integrations.aws.cost.errors import CostReportError, aws_call

#: Index of the request log: `day` is its partition key, and it holds both numbers of tokens. A
#: scan would read, and cost, the whole table for one day.
DAY_INDEX: Final = "by_day"
_TIME_LIMIT_S: Final = 60.0
_NOT_THERE: Final = frozenset({"ResourceNotFoundException", "ValidationException"})


@dataclass(frozen=True, slots=True)
class Usage:
    """Requests that were submitted on a day, and their tokens."""

    num_requests: int
    num_input_tokens: int
    num_output_tokens: int

    @property
    def num_tokens(self) -> int:
        """Tokens read and generated."""
        return self.num_input_tokens + self.num_output_tokens


def read_usage(
    aws: AwsClients, table: str, day: date, *, time_limit_s: float = _TIME_LIMIT_S
) -> Usage:
    """Count the requests of a day, page by page.

    Args:
        aws: Opens the client.
        table: DynamoDB table of the request log.
        day: Day on which they were submitted, in UTC.
        time_limit_s: Seconds after which no further page is read.

    Raises:
        CostReportError: The table cannot be read, has no such index, holds an item that is no
            request, or takes too long.
    """
    client = aws.open("dynamodb")
    request: dict[str, Any] = {
        "TableName": table,
        "IndexName": DAY_INDEX,
        "KeyConditionExpression": "#day = :day",
        "ExpressionAttributeNames": {"#day": "day"},
        "ExpressionAttributeValues": {":day": {"S": day.isoformat()}},
        "ProjectionExpression": "input_tokens, output_tokens",
    }
    num_requests = num_input_tokens = num_output_tokens = 0
    ends_at = time.monotonic() + time_limit_s
    while True:
        page = _page(client, request)
        with aws_call("dynamodb:Query"):
            for item in page["Items"]:
                num_requests += 1
                num_input_tokens += int(item["input_tokens"]["N"])
                num_output_tokens += int(item["output_tokens"]["N"])
            last = page.get("LastEvaluatedKey")
        if not last:
            return Usage(num_requests, num_input_tokens, num_output_tokens)
        if time.monotonic() >= ends_at:
            raise CostReportError(
                f"dynamodb:Query: not done with {num_requests:,} requests after {time_limit_s:g} s"
            )
        request["ExclusiveStartKey"] = last


def _page(client: Any, request: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        with aws_call("dynamodb:Query"):
            page: Mapping[str, Any] = client.query(**request)
            return page
    except CostReportError as error:
        if error.code not in _NOT_THERE:
            raise
        raise CostReportError(
            f"dynamodb:Query: there is no table {request['TableName']} with an index {DAY_INDEX} "
            f"of the key day and both numbers of tokens",
            error.code,
        ) from None
