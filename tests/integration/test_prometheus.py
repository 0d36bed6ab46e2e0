"""Rules and dashboard against the real Prometheus, which scrapes the real server."""

import json
import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.support.emf import emf_lines
from tests.support.observability import (
    ALERT_TESTS,
    DASHBOARD,
    QUERIES,
    RULES,
    Panel,
    fields_by_event,
    panels,
    read_insight,
)
from tests.support.prometheus import JOB, Prometheus, scraping
from tests.support.served import example_environment, started, wait_until_ready
from tests.support.tools import require_tool

RECORDED = re.findall(r"- record: (\S+)", "\n".join(path.read_text("utf-8") for path in RULES))
PANELS = panels(JOB, "30s")
BODIES = (
    {"prompt": "w " * 1_024, "max_new_tokens": 8},
    {"prompt": "w " * 600, "max_new_tokens": 4, "stream": True},
    {"prompt": "a b c"},
    {"prompt": ""},
)

pytestmark = pytest.mark.slow


@dataclass(frozen=True, slots=True)
class Scraped:
    """A server with traffic, what scrapes it, and where its lines go."""

    address: str
    prometheus: Prometheus
    log: Path


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    """Serve a fake engine under uvicorn, send it requests, and let Prometheus scrape it."""
    program = require_tool("prometheus", "SNAPKV_TEST_PROMETHEUS")
    folder = tmp_path_factory.mktemp("prometheus")
    log = folder / "server.log"
    model = folder / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors"):
        (model / name).write_text("{}")  # only hashed: the engine is a fake
    environment = example_environment(folder) | {
        "SNAPKV_MODEL": str(model),
        "SNAPKV_MAX_CAPACITY_PROMPT": "512",
        "SNAPKV_PRICE_PER_HOUR": "1.8",
        "SNAPKV_SNAPSHOT_MEMORY_BYTES": "1000000",
    }
    command = ["-m", "tests.support.fake_server", "0", "0.002"]
    with started(command, environment, log) as (process, address):
        wait_until_ready(process, address, log, within_s=60)
        with traffic(address), scraping(program, address, folder) as prometheus:
            yield Scraped(address, prometheus, log)


@contextmanager
def traffic(address: str) -> Iterator[None]:
    """Send requests, good and bad, until the block ends."""
    is_over = threading.Event()

    def send() -> None:
        with httpx.Client(base_url=f"http://{address}", timeout=10) as client:
            while not is_over.wait(0.02):
                for body in BODIES:
                    client.post("/generate", json=body)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        yield
    finally:
        is_over.set()
        sender.join()


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: f"{panel.title}: {panel.query}"[:80])
def test_query_of_the_dashboard_returns_data(panel: Panel, scraped: Scraped) -> None:
    """A panel that shows nothing is found out here and not in the middle of an incident."""
    assert scraped.prometheus.wait_for(panel.query), panel.query


@pytest.mark.parametrize("name", RECORDED)
def test_recording_rule_returns_data(name: str, scraped: Scraped) -> None:
    """Alerts compare these series; where there are none, no alert fires."""
    assert scraped.prometheus.wait_for(name), name


def test_variables_of_the_dashboard_have_values(scraped: Scraped) -> None:
    """The choice of jobs is filled from a series."""
    (variable,) = [
        item
        for item in json.loads(DASHBOARD.read_text(encoding="utf-8"))["templating"]["list"]
        if item["type"] == "query"
    ]
    parts = re.fullmatch(r"label_values\((?P<series>\w+), (?P<label>\w+)\)", variable["query"])
    assert parts is not None
    assert scraped.prometheus.wait_for(parts["series"])
    parameters = {"match[]": parts["series"]}
    assert scraped.prometheus.get(f"label/{parts['label']}/values", **parameters) == [JOB]


def test_recorded_values_are_right(scraped: Scraped) -> None:
    """Sums over what the traffic is known to be."""
    # Two of the three answered prompts are compressed to 512 entries, of 1,024 and 600.
    (ratio,) = scraped.prometheus.wait_for("job:snapkv_compression_ratio:rate1h")
    assert ratio == pytest.approx((1_024 + 600 + 3) / (512 + 512 + 3), rel=0.05)
    (mass,) = scraped.prometheus.wait_for("job:snapkv_kept_attention_mass:mean_rate1h")
    assert mass == pytest.approx(0.9)
    (failures,) = scraped.prometheus.wait_for("job:snapkv_request_failures:ratio_rate5m")
    assert failures == 0
    (price,) = scraped.prometheus.wait_for("job:snapkv_price_per_million_output_tokens:rate5m")
    (rate,) = scraped.prometheus.wait_for("job:snapkv_output_tokens:rate5m")
    assert price == pytest.approx(1.8 / 3_600 / rate * 1e6, rel=0.2)


def test_rules_are_healthy_and_no_alert_is_active(scraped: Scraped) -> None:
    """Each rule was evaluated without error, and a service that is well worries nobody."""
    assert scraped.prometheus.wait_for("job:snapkv_price_per_million_tokens:rate5m")
    rules = [rule for group in scraped.prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert len(rules) > len(RECORDED)
    unhealthy = {rule["name"]: rule["health"] for rule in rules if rule["health"] != "ok"}
    assert not unhealthy
    assert scraped.prometheus.get("alerts")["alerts"] == []


def test_standard_output_is_lines_of_json_with_metrics_among_them(scraped: Scraped) -> None:
    """What a log driver would read of the real process."""
    assert scraped.prometheus.wait_for("snapkv_output_tokens_total > 0")
    text = scraped.log.read_text(encoding="utf-8")
    # The last line may be half written, and the file has standard error too, where libraries
    # complain while they are imported.
    text = text[text.index('{"') : text.rindex("\n")]
    metrics = emf_lines(text)
    assert {"Latency", "Load"} <= {name for line in metrics for name in line.values}
    known = fields_by_event(text)
    for path in QUERIES:
        insight = read_insight(path.read_text(encoding="utf-8"))
        assert insight.fields <= known[insight.event], path.name


def test_promtool_accepts_the_rules() -> None:
    """Syntax, templates and duplicates."""
    promtool = require_tool("promtool", "SNAPKV_TEST_PROMTOOL")
    done = run(promtool, "check", "rules", *map(str, RULES))
    assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_fire_for_their_cause_and_alone() -> None:
    """The unit tests beside the rules."""
    promtool = require_tool("promtool", "SNAPKV_TEST_PROMTOOL")
    done = run(promtool, "test", "rules", str(ALERT_TESTS))
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_names_of_metrics(scraped: Scraped) -> None:
    """Conventions of names, units and help; names of other servers are given and exempt."""
    promtool = require_tool("promtool", "SNAPKV_TEST_PROMTOOL")
    page = httpx.get(f"http://{scraped.address}/metrics", timeout=10).text
    own = [line for line in page.splitlines() if not re.match(r"(# (HELP|TYPE) )?vllm:", line)]
    assert len(own) < len(page.splitlines())
    done = run(promtool, "check", "metrics", given="\n".join(own) + "\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def run(*command: str, given: str = "") -> subprocess.CompletedProcess[str]:
    """Run a program that ends by itself."""
    return subprocess.run(
        command, input=given, capture_output=True, text=True, timeout=240, check=False
    )
