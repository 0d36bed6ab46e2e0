"""Rules, dashboard, queries and runbook speak of what the service really emits."""

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.main import create_app
from tests.support.app_client import fake_service, running, settings_for_tests
from tests.support.fake_engine import FakeEngine, load_fake_engine
from tests.support.logs import captured_log
from tests.support.markdown import ROOT
from tests.support.observability import (
    ALERT_TESTS,
    DASHBOARD,
    QUERIES,
    RULES,
    fields_by_event,
    metric_names,
    panels,
    read_insight,
    unknown_functions,
)

RULES_TEXT = "\n".join(path.read_text(encoding="utf-8") for path in RULES)
ALERTS = re.findall(r"- alert: (\w+)", RULES_TEXT)
RUNBOOK = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
LOGS_PAGE = (ROOT / "docs" / "logs.md").read_text(encoding="utf-8")


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """Capture what an ordinary service writes."""
    with captured_log("info") as stream:
        yield stream


async def served_names() -> set[str]:
    """Return the name of every series of a service that knows its price."""
    app = create_app(settings_for_tests(price_per_hour=1.5), load_engine=load_fake_engine)
    async with running(app) as client:
        await client.post("/generate", json={"prompt": "w " * 1_024})
        page = (await client.get("/metrics")).text
    return set(re.findall(r"^([a-z_:]\w[\w:]*)", page, flags=re.MULTILINE))


async def test_rules_and_dashboard_read_series_that_exist() -> None:
    """A misspelled name never fires and never draws, without a word."""
    served = await served_names()
    recorded = set(re.findall(r"- record: (\S+)", RULES_TEXT))
    used = metric_names(re.sub(r"- record: \S+|runbook: \S+", "", RULES_TEXT))
    for panel in panels(".*", "1m"):
        used |= metric_names(panel.query)
    assert used - served <= recorded, used - served - recorded
    assert len(used & served) > 10


def test_every_recorded_series_is_read() -> None:
    """By an alert, the dashboard or another rule; or it only costs memory."""
    recorded = re.findall(r"- record: (\S+)", RULES_TEXT)
    readers = re.sub(r"- record: \S+", "", RULES_TEXT) + DASHBOARD.read_text(encoding="utf-8")
    unread = {name for name in recorded if name not in readers}
    assert not unread


def test_dashboard_has_what_was_promised() -> None:
    """One panel per question, each with a title of its own kind and a description."""
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    assert all(panel["description"] for panel in dashboard["panels"])
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    assert {panel["title"] for panel in dashboard["panels"]} >= {
        "Time to first token",
        "Inter-token latency",
        "Throughput",
        "Queue",
        "Pages",
        "Compression ratio",
        "Kept attention mass",
        "Errors",
        "Price per million tokens",
    }


def test_panels_do_not_overlap() -> None:
    """Grafana would move them about."""
    cells: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]:
        grid = panel["gridPos"]
        taken = {
            (x, y)
            for x in range(grid["x"], grid["x"] + grid["w"])
            for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not taken & cells, panel["title"]
        assert grid["x"] + grid["w"] <= 24
        cells |= taken


def test_every_alert_leads_to_its_section_and_back() -> None:
    """Who is woken finds what to do, and no section is about an alert that is gone."""
    links = re.findall(r"runbook: docs/runbook\.md#(\w+)", RULES_TEXT)
    assert links == [name.lower() for name in ALERTS]
    assert re.findall(r"^## (Snapkv\w+)$", RUNBOOK, flags=re.MULTILINE) == ALERTS


@pytest.mark.parametrize("alert", ALERTS)
def test_section_of_the_runbook_is_complete(alert: str) -> None:
    """Meaning, first look, usual cause, what to do."""
    section = RUNBOOK.partition(f"## {alert}\n")[2].partition("\n## ")[0]
    for part in ("Meaning", "First look", "Usual cause", "What to do"):
        assert f"**{part}.**" in section, f"{alert} lacks {part}"


@pytest.mark.parametrize("alert", ALERTS)
def test_every_alert_has_a_test_in_which_it_fires(alert: str) -> None:
    """`promtool test rules` runs them elsewhere; here none is forgotten."""
    assert f'{{alertname="{alert}"}}' in ALERT_TESTS.read_text(encoding="utf-8")


async def test_queries_read_fields_that_the_service_writes(log: io.StringIO) -> None:
    """Each query filters by one event, and each of its fields is in that event."""
    engine = FakeEngine()
    async with fake_service(engine) as client:
        await client.post("/generate", json={"prompt": "w " * 1_024})
        await client.post("/generate", json={"prompt": ""})
    known = fields_by_event(log.getvalue())
    assert len(QUERIES) >= 5
    for path in QUERIES:
        insight = read_insight(path.read_text(encoding="utf-8"))
        assert insight.event in known, path.name
        assert insight.fields <= known[insight.event], path.name
        assert not unknown_functions(insight), path.name


@pytest.mark.parametrize("path", QUERIES, ids=lambda path: path.name)
def test_query_is_documented(path: Path) -> None:
    """The page of logs lists the queries."""
    assert f"`{path.name}`" in LOGS_PAGE


def test_reader_of_queries_sees_fields_and_functions() -> None:
    """The tests above would otherwise pass on anything."""
    insight = read_insight(
        '# Seed.\nfilter event = "a_b" and x.y in ["stop"]\n'
        "| stats percentile(duration_ms, 95) as p95, sum(a) / sum(b) as ratio by bin(5m), model\n"
        "| sort p95 desc | limit 3"
    )
    assert insight.event == "a_b"
    assert insight.fields == {"event", "x.y", "duration_ms", "a", "b", "model"}
    assert unknown_functions(insight) == {"percentile"}


@pytest.mark.parametrize("text", ['filter event = "a"', "# No event.\nfilter a = 1"])
def test_reader_of_queries_refuses_what_says_too_little(text: str) -> None:
    """A query has a comment and one event."""
    with pytest.raises(ValueError, match=r"comment|filters"):
        read_insight(text)
