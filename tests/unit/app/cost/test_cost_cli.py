"""`snapkv cost report`: what it prints, what it sends, and how it exits."""

import json
import re
from decimal import Decimal
from pathlib import Path

import pytest

from tests.support.command import Command
from tests.support.cost_explorer import FakeCostExplorer, LineItem
from tests.support.cost_report import DAY, Topic, log_requests


@pytest.fixture
def cost_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Command:
    """Return the command, in a folder without a .env file and on a wide terminal."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return Command(monkeypatch, capsys)


def test_table_for_people(cost_report: Command, aws: FakeCostExplorer, request_log: str) -> None:
    """Every figure and what it is, thresholds in words, and what the report itself cost."""
    log_requests(request_log, DAY, 40, input_tokens=5_000, output_tokens=250)
    thresholds = ["--threshold", "80", "--threshold", "medium=90,small=1.5"]
    status, out, err = cost_report("cost", "report", *thresholds)
    assert (status, err) == (0, "")
    rows = {
        cells[1]: cells[0]
        for cells in (re.split(r"\s*[│|]\s*", line.strip("│| ")) for line in out.splitlines())
        if len(cells) == 2
    }
    assert rows["Amazon Elastic Compute Cloud - Compute"] == "71.13 USD"
    assert rows["medium"] == "82.43 USD"
    assert rows["without the tag Tier"] == "0.41 USD"
    assert rows["2026-11-01 to 2026-11-28"] == "2,057.30 USD"
    assert rows["2026-11-29 so far, an estimate"] == "43.46 USD"
    assert rows["forecast for the whole month"] == "2,173.76 USD"
    assert rows["per 1,000 requests"] == "2,102.1000 USD"
    assert rows["per million tokens"] == "400.4000 USD"
    assert "Cost of 2026-11-28, resources tagged Project=snapkv: 84.08 USD" in out
    assert "OVER the threshold of 80.00 USD, by 4.08 USD" in out
    assert (
        "for tier small cannot be checked: the cost that it is for is between 1.25 USD and" in out
    )
    assert "Within the threshold of 90.00 USD for tier medium" in out
    assert "with 2 requests to Cost Explorer, which cost 0.02 USD" in out
    assert len(aws.requests) == 2


@pytest.mark.usefixtures("aws")
def test_json_for_programs(cost_report: Command) -> None:
    """One object on standard output and nothing else."""
    status, out, err = cost_report("cost", "report", "--json", "--day", "2026-11-05")
    assert (status, err) == (0, "")
    report = json.loads(out)
    assert report["day"] == "2026-11-05"
    assert Decimal(report["cost"]) == Decimal("73.082")
    assert Decimal(report["month_to_date"]) == 5 * Decimal("73.082")
    assert report["tag"] == {"key": "Project", "value": "snapkv"}
    assert report["is_over_threshold"] is False


@pytest.mark.usefixtures("aws")
def test_options_win_over_settings(cost_report: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tag and the thresholds of the command line are the ones that count."""
    monkeypatch.setenv("SNAPKV_COST_TAG_VALUE", "nobody")
    monkeypatch.setenv("SNAPKV_COST_DAILY_THRESHOLD", "1")
    options = ["--tag", "Project=other", "--threshold", "200"]
    status, out, _ = cost_report("cost", "report", "--json", *options)
    report = json.loads(out)
    assert status == 0
    assert Decimal(report["cost"]) == 200
    assert [check["threshold"] for check in report["thresholds"]] == ["200"]
    assert report["is_over_threshold"] is False


@pytest.mark.usefixtures("aws")
def test_sent_as_well(cost_report: Command, topic: Topic) -> None:
    """A subscriber gets the message; standard output stays the report's."""
    status, out, err = cost_report("cost", "report", "--json", "--send", "--threshold", "80")
    assert (status, err) == (0, f"sent to {topic.arn}\n")
    assert json.loads(out)["is_over_threshold"] is True
    (message,) = topic.received()
    assert message["Subject"] == "OVER THRESHOLD: SnapKV cost 2026-11-28: 84.08 USD"
    assert message["Message"].startswith("Cost of 2026-11-28, resources tagged Project=snapkv: ")
    assert message["MessageAttributes"] == {
        "report_day": {"Type": "String", "Value": "2026-11-28"},
        "over_threshold": {"Type": "String", "Value": "true"},
    }


@pytest.mark.usefixtures("aws")
def test_topic_that_is_not_there_fails_after_the_report(
    cost_report: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report was paid for, so it is shown."""
    arn = "arn:aws:sns:us-east-1:123456789012:nowhere"
    monkeypatch.setenv("SNAPKV_COST_TOPIC_ARN", arn)
    status, out, err = cost_report("cost", "report", "--send")
    assert (status, err) == (1, "error: sns:Publish: failed (NotFound)\n")
    assert "84.08 USD" in out


def test_failure_is_one_line_and_exit_1(cost_report: Command, aws: FakeCostExplorer) -> None:
    """Nothing is printed that could be taken for a report."""
    aws.refuse("GetCostAndUsage", "AccessDeniedException")
    status, out, err = cost_report("cost", "report")
    assert (status, out) == (1, "")
    assert err.startswith("error: ce:GetCostAndUsage: denied (AccessDeniedException)")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--day", "2026-11-31"], "--day: must be a day such as 2026-11-28"),
        (["--day", "2026-11-30"], "--day: 2026-11-30 is not over"),
        (["--day", "2027-01-01"], "is not over"),
        (["--threshold", "many"], "--threshold: must be amounts above zero"),
        (["--threshold", "1", "--threshold", "2"], "--threshold: names the total twice"),
        (["--tag", "Project"], "--tag: must be KEY=VALUE"),
        (["--tag", "=x"], "--tag: must be KEY=VALUE"),
        (["--tag", f"{'k' * 200}=x"], "SNAPKV_COST_TAG_KEY"),
        (["--send"], "SNAPKV_COST_TOPIC_ARN names no topic"),
    ],
)
def test_wrong_use_is_one_line_and_exit_2(
    cost_report: Command, aws: FakeCostExplorer, arguments: list[str], part: str
) -> None:
    """Whoever typed it reads what to change, and pays for no request."""
    status, out, err = cost_report("cost", "report", *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert part in err
    assert aws.requests == []


def test_unknown_option_is_wrong_use(cost_report: Command) -> None:
    """As everywhere in the command."""
    assert cost_report("cost", "report", "--month", "11")[0] == 2


def test_names_from_aws_are_no_markup_and_fit_the_terminal(
    cost_report: Command, aws: FakeCostExplorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tag's value is whatever somebody typed."""
    tags = {"Project": "snapkv", "Tier": "[red]gro\u00df[/nonsense]"}
    aws.account.bill.append(LineItem(DAY, "x", "1", tags))
    monkeypatch.setattr("rich.console.Console.encoding", "ascii")
    status, out, err = cost_report("cost", "report")
    assert (status, err) == (0, "")
    assert r"[red]gro\xdf[/nonsense]" in out
