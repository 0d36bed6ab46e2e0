"""docs/cost-report.md shows what the code does: its messages, its JSON, the actions it needs."""

import functools
import json
import re
from pathlib import Path
from typing import Any

import boto3
import pytest

from tests.support.command import Command
from tests.support.cost_explorer import FakeCostExplorer
from tests.support.cost_report import DAY, Topic, create_request_log, log_requests
from tests.support.markdown import ROOT, Block, blocks_of

BLOCKS = list(blocks_of(ROOT / "docs" / "cost-report.md"))


def documented(beginning: str) -> Block:
    """Return the one block that begins so."""
    (found,) = (block for block in BLOCKS if block.text.startswith(beginning))
    return found


@functools.cache
def documented_log() -> str:
    """Write the 1,200 requests of the page, once for all tests."""
    table = create_request_log()
    log_requests(table, DAY, 1_200, input_tokens=5_400, output_tokens=280)
    return table


@pytest.fixture
def run_example(
    aws: FakeCostExplorer,  # noqa: ARG001  # what it asks
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> Command:
    """Return the command on the day that the page shows."""
    monkeypatch.setenv("SNAPKV_REQUEST_LOG_TABLE", documented_log())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SNAPKV_COST_DAILY_THRESHOLD", "80,medium=90")
    return Command(monkeypatch, capsys)


def test_message_is_the_one_that_is_sent(run_example: Command, topic: Topic) -> None:
    """To the letter."""
    assert run_example("cost", "report", "--send")[0] == 0
    (message,) = topic.received()
    assert message["Message"] == documented("Cost of 2026-11-28, resources").text
    assert f"`{message['Subject']}`" in (ROOT / "docs" / "cost-report.md").read_text("utf-8")


def test_json_is_the_one_that_is_printed(run_example: Command) -> None:
    """Every key and every figure."""
    status, out, _ = run_example("cost", "report", "--json")
    assert status == 0
    assert json.loads(out) == json.loads(documented('{\n  "day"').text)


def test_notice_of_the_tag_is_the_one_that_is_shown(
    run_example: Command, aws: FakeCostExplorer, topic: Topic
) -> None:
    """Whoever searches the page for the words finds them."""
    aws.account.tag_statuses = {"Project": "Inactive"}
    assert run_example("cost", "report", "--send")[0] == 0
    assert documented("- No cost of this month carries").text in topic.received()[0]["Message"]


def test_policy_allows_what_is_called_and_nothing_else(
    run_example: Command, aws: FakeCostExplorer, topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the tag activated and without it, every action is asked for once."""
    called: set[str] = set()
    honest = boto3.session.Session.client

    def client(self: Any, service: str, **kwargs: Any) -> Any:
        made = honest(self, service, **kwargs)
        made.meta.events.register(
            "before-call", lambda model, **_: called.add(f"{service}:{model.name}")
        )
        return made

    monkeypatch.setattr(boto3.session.Session, "client", client)
    assert run_example("cost", "report", "--send")[0] == 0
    aws.account.tag_statuses = {}
    assert run_example("cost", "report", "--send")[0] == 0
    policy = json.loads(documented('{\n  "Version"').text)
    allowed = [action for each in policy["Statement"] for action in each["Action"]]
    assert sorted(allowed) == sorted(called)
    assert len(topic.queue_url) > 0


def test_every_option_is_in_the_page() -> None:
    """And the page names no other."""
    page = (ROOT / "docs" / "cost-report.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(--[a-z]+)", page))
    assert named == {"--day", "--tag", "--threshold", "--json", "--send"}
