"""Counting a day in the request log, on moto's DynamoDB."""

from datetime import timedelta
from typing import Any

import boto3
import pytest

from app.integrations.aws.cost.clients import AwsClients
from app.integrations.aws.cost.errors import CostReportError
from app.integrations.aws.cost.usage import DAY_INDEX, Usage, read_usage
from app.integrations.aws.request_item import REQUEST_LOG_TABLE
from tests.support.cost_report import DAY, create_request_log, log_requests, shared_clients


def test_only_the_day_is_counted(request_log: str) -> None:
    """The days around it have requests too."""
    for offset, tokens in ((-1, 1), (0, 100), (1, 10_000)):
        log_requests(
            request_log, DAY + timedelta(days=offset), 3, input_tokens=tokens, output_tokens=7
        )
    assert read_usage(shared_clients(), request_log, DAY) == Usage(3, 300, 21)
    assert read_usage(shared_clients(), request_log, DAY + timedelta(days=5)) == Usage(0, 0, 0)
    assert Usage(3, 300, 21).num_tokens == 321


def count_queries(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Keep the parameters of every query from now on."""
    asked: list[dict[str, Any]] = []
    honest = boto3.session.Session.client

    def client(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = honest(self, *args, **kwargs)
        made.meta.events.register(
            "before-parameter-build.dynamodb.Query", lambda params, **_: asked.append(dict(params))
        )
        return made

    monkeypatch.setattr(boto3.session.Session, "client", client)
    return asked


def test_every_page_is_read(request_log: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """DynamoDB ends a page after 1 MB."""
    large = "x" * 300_000
    log_requests(request_log, DAY, 9, input_tokens=2, output_tokens=1, padding=large)
    asked = count_queries(monkeypatch)
    assert read_usage(shared_clients(), request_log, DAY) == Usage(9, 18, 9)
    assert len(asked) > 1
    assert all(params["IndexName"] == "by_day" for params in asked)
    assert all(params["ProjectionExpression"].count("tokens") == 2 for params in asked)


def test_a_day_that_takes_too_long_is_given_up(request_log: str) -> None:
    """The report does not wait for a log without end."""
    large = "x" * 300_000
    log_requests(request_log, DAY, 9, input_tokens=2, output_tokens=1, padding=large)
    with pytest.raises(CostReportError, match=r"not done with \d requests after 0 s"):
        read_usage(shared_clients(), request_log, DAY, time_limit_s=0.0)


def test_table_without_the_index_is_named() -> None:
    """A request log that somebody else created."""
    table = create_request_log(has_index=False)
    with pytest.raises(CostReportError, match=f"no table {table} with an index by_day"):
        read_usage(shared_clients(), table, DAY)


def test_item_that_is_no_request_is_an_error(request_log: str) -> None:
    """A wrong count would look like a right one."""
    item = {"request_id": {"S": "x"}, "day": {"S": DAY.isoformat()}, "started_at": {"S": "x"}}
    boto3.client("dynamodb").put_item(TableName=request_log, Item=item)
    with pytest.raises(CostReportError, match="cannot be understood"):
        read_usage(shared_clients(), request_log, DAY)


def test_no_region_is_named(request_log: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unlike Cost Explorer's, the table is in one region."""
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    with pytest.raises(CostReportError, match="knows no region; set AWS_DEFAULT_REGION"):
        read_usage(AwsClients(), request_log, DAY)


def test_the_service_keeps_the_index_that_is_read() -> None:
    index = REQUEST_LOG_TABLE.index
    assert (index.name, index.hash_key) == (DAY_INDEX, "day")
    assert set(index.projected) == {"input_tokens", "output_tokens"}
