"""The Lambda function: a message every day, the right day, and a small package."""

import json
import logging
import os
import subprocess
import sys
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import boto3
import pytest

from app.integrations.aws.cost.errors import CostReportError
from app.integrations.aws.cost.handler import handler
from tests.support.cost_explorer import FakeCostExplorer, LineItem
from tests.support.cost_report import ACTIVE, DAY, Topic, log_requests
from tests.support.markdown import ROOT, blocks_of

PAGE = ROOT / "docs" / "cost-report.md"


@pytest.mark.usefixtures("aws")
def test_message_is_sent_every_day(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below the threshold too, unmarked; silence would look like a function that died."""
    monkeypatch.setenv("SNAPKV_COST_DAILY_THRESHOLD", "100")
    handler({}, None)
    monkeypatch.setenv("SNAPKV_COST_DAILY_THRESHOLD", "84")
    handler({}, None)
    marks = {
        message["Subject"]: message["MessageAttributes"]["over_threshold"]["Value"]
        for message in topic.received()
    }
    assert marks == {
        "SnapKV cost 2026-11-28: 84.08 USD": "false",
        "OVER THRESHOLD: SnapKV cost 2026-11-28: 84.08 USD": "true",
    }


@pytest.mark.usefixtures("aws")
def test_report_is_returned_and_a_line_logged(
    topic: Topic, request_log: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What was sent can be seen in the function's log and in the answer of a call by hand."""
    log_requests(request_log, DAY, 4, input_tokens=90, output_tokens=10)
    with caplog.at_level(logging.INFO, "app.integrations.aws.cost"):
        report = handler({}, None)
    assert json.loads(json.dumps(report)) == report
    assert report["usage"]["requests"] == 4
    assert Decimal(report["usage"]["cost_per_1000_requests"]) == Decimal("21021")
    (record,) = (line for line in caplog.records if line.name.startswith("app."))
    assert record.message == "cost_report_sent"
    assert vars(record)["report_day"] == "2026-11-28"
    assert topic.received()


@pytest.mark.usefixtures("aws")
@pytest.mark.parametrize(
    ("event", "day"),
    [
        ({}, "2026-11-28"),
        ({"time": "2026-11-30T00:10:00Z"}, "2026-11-28"),
        # Tried again after midnight, it is still the report that was scheduled.
        ({"time": "2026-11-29T23:50:00Z"}, "2026-11-27"),
        ({"time": "2026-11-30T08:00:00+09:00"}, "2026-11-27"),
        ({"day": "2026-11-05", "time": "2026-11-30T00:10:00Z"}, "2026-11-05"),
    ],
)
def test_day_comes_from_the_event(topic: Topic, event: dict[str, str], day: str) -> None:
    """The scheduled time, not the clock, says which day it is about."""
    assert handler(event, None)["day"] == day
    assert topic.received()[0]["MessageAttributes"]["report_day"]["Value"] == day


@pytest.mark.parametrize(
    "event", [{"day": "soon"}, {"day": "2026-11-30"}, {"day": 5}, {"time": "x"}, {"time": None}]
)
def test_event_that_names_no_day_is_refused_before_anything_is_paid_for(
    aws: FakeCostExplorer, topic: Topic, event: dict[str, Any]
) -> None:
    """An invocation that fails is seen; a report of a wrong day is not."""
    with pytest.raises(CostReportError, match=r"^event: "):
        handler(event, None)
    assert aws.requests == []
    assert topic.received() == []


def test_without_topic_nothing_is_paid_for(aws: FakeCostExplorer) -> None:
    """The mistake of an unfinished deployment."""
    with pytest.raises(CostReportError, match="SNAPKV_COST_TOPIC_ARN: must name the topic"):
        handler({}, None)
    assert aws.requests == []


def test_failure_sends_nothing_and_fails_the_invocation(
    aws: FakeCostExplorer, topic: Topic
) -> None:
    """Lambda tries again and then raises its alarm; no half report goes out."""
    aws.refuse("GetCostAndUsage", "ThrottlingException")
    with pytest.raises(CostReportError, match="throttled"):
        handler({}, None)
    assert topic.received() == []
    handler({}, None)
    assert len(topic.received()) == 1


@pytest.mark.usefixtures("aws")
def test_fifo_topic_gets_a_day_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The day is the deduplication id."""
    sns = boto3.client("sns")
    arn = sns.create_topic(Name="snapkv-alerts.fifo", Attributes={"FifoTopic": "true"})["TopicArn"]
    monkeypatch.setenv("SNAPKV_COST_TOPIC_ARN", arn)
    sent: list[Any] = []
    honest = boto3.session.Session.client

    def client(self: Any, service: str, **kwargs: Any) -> Any:
        made = honest(self, service, **kwargs)
        made.meta.events.register(
            "before-parameter-build.sns.Publish", lambda params, **_: sent.append(dict(params))
        )
        return made

    monkeypatch.setattr(boto3.session.Session, "client", client)
    handler({}, None)
    assert sent[0]["MessageDeduplicationId"] == "snapkv-cost-2026-11-28"


def test_everything_against_another_aws(
    topic: Topic, request_log: str, moto_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Cost Explorer of moto, which is not of this project, answers with what it is told."""
    log_requests(request_log, DAY, 2, input_tokens=900, output_tokens=100)
    group = {
        "Keys": ["AWS Lambda", "Tier$small"],
        "Metrics": {"UnblendedCost": {"Amount": "0.0101516483", "Unit": "USD"}},
    }
    result = {
        "TimePeriod": {"Start": "2026-11-28", "End": "2026-11-29"},
        "Total": {},
        "Groups": [group],
        "Estimated": False,
    }
    body = json.dumps({"results": [{"ResultsByTime": [result], "DimensionValueAttributes": []}]})
    queue = f"{moto_url}/moto-api/static/ce/cost-and-usage-results"
    headers = {"Content-Type": "application/json"}
    with urlopen(Request(queue, body.encode(), headers), timeout=5) as answer:
        assert answer.status == 201
    monkeypatch.setenv("SNAPKV_COST_DAILY_THRESHOLD", "small=0.01")
    report = handler({}, None)
    assert report["cost"] == "0.0101516483"
    assert report["is_over_threshold"] is True
    assert Decimal(report["usage"]["cost_per_1000_requests"]) == Decimal("5.075824")
    # It knows no forecasts.
    assert set(report["missing"]) == {"month_forecast"}
    assert "0.01 USD  small" in topic.received()[0]["Message"]


RUN = """
import json, sys
from app.integrations.aws.cost.handler import handler
report = handler({"day": sys.argv[1]}, None)
import app
heavy = {"torch", "transformers", "snapkv_core", "fastapi", "numpy", "structlog", "typer"}
print(json.dumps({
    "cost": report["cost"],
    "app": app.__file__,
    "heavy": sorted(heavy & set(sys.modules)),
    "settings": "app.settings" in sys.modules,
}))
"""


@pytest.mark.usefixtures("request_log")
def test_package_of_the_documentation_is_enough_and_small(
    aws: FakeCostExplorer, topic: Topic, tmp_path: Path
) -> None:
    """The files that the page says to pack run on their own, without PyTorch.

    The process has the real clock, so the bill is of the day before yesterday.
    """
    (pack,) = (block for block in blocks_of(PAGE) if "cp --parents" in block.text)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", pack.text],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},  # noqa: TID251  # handed on to a process
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert done.stderr == ""
    aws.account.today = datetime.now(tz=UTC).date()
    day: date = aws.account.today - timedelta(days=2)
    aws.account.bill = [LineItem(day, "x", "5", {"Project": "snapkv"})]
    aws.account.tag_statuses = dict(ACTIVE)
    done = subprocess.run(
        [sys.executable, "-c", RUN, day.isoformat()],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},  # noqa: TID251  # as above
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    result = json.loads(done.stdout)
    assert result.pop("app").startswith(str(folder))
    assert result == {"cost": "5", "heavy": [], "settings": False}
    assert f"SnapKV cost {day}: 5.00 USD" in topic.received()[0]["Subject"]
