"""Labels of metrics take values from small fixed sets, whatever callers send."""

import uuid
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from app.main import create_app
from app.telemetry.metrics import ERROR_REASONS, OTHER_REASON
from snapkv_core import FinishReason
from snapkv_core.config import COMPRESSION_METHODS
from tests.support.app_client import running, settings_for_tests
from tests.support.fake_engine import FakeEngine

ROUTES = {
    "/generate",
    "/",
    "/playground/{path:path}",
    "/playground.json",
    "/tokenize",
    "/detokenize",
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/models",
    "/v1/models/{model:path}",
    "/health/live",
    "/health/ready",
    "/metrics",
    "/docs",
    "/docs/{path:path}",
    "unmatched",
}
OUTCOMES = {"success", "invalid", "rejected", "deadline", "aborted", "error"}

REQUEST_LOG_OUTCOMES = {"written", "dropped", "failed"}
REFRESH_OUTCOMES = {"unchanged", "applied", "restart_needed", "failed"}
SNAPSHOT_USES = {"hit", "stored", "miss", "off"}
SNAPSHOT_OUTCOMES = {
    *("hit", "miss", "no_hit", "rejected", "timeout", "failed", "held_back"),
    *("stored", "dropped"),
}
#: Every label, with every value it may take; `le` are the buckets of histograms.
ALLOWED = {
    "route": ROUTES,
    "outcome": {*OUTCOMES, *REQUEST_LOG_OUTCOMES, *REFRESH_OUTCOMES, *SNAPSHOT_OUTCOMES},
    "reason": {*ERROR_REASONS, OTHER_REASON},
    "finish_reason": {reason.value for reason in FinishReason},
    "phase": {"prefill", "decode"},
    "state": {"used", "reserved", "total", "allocated"},
    "method": set(COMPRESSION_METHODS),
    "skipped": {"none", "prompt_fits_capacity", "method_full"},
    "snapshot": SNAPSHOT_USES,
    "direction": {"fetched", "stored"},
    "store": {"valkey", "s3"},
    "model": {"fake"},
    "model_name": {"fake"},
}
MAX_SERIES = 1_500


async def labels_of(client: httpx.AsyncClient) -> tuple[dict[str, set[str]], int]:
    """Return the values of every label but `le`, and the number of series."""
    values: dict[str, set[str]] = {}
    num_series = 0
    for family in text_string_to_metric_families((await client.get("/metrics")).text):
        for sample in family.samples:
            num_series += 1
            for label, value in sample.labels.items():
                if label != "le":
                    values.setdefault(label, set()).add(value)
    return values, num_series


def bodies() -> list[dict[str, Any]]:
    """Return requests that differ each time in everything a caller may choose."""
    name = uuid.uuid4().hex
    return [
        {"prompt": name},
        {"prompt": "w " * 1_024, "stream": True},
        {"prompt": name, "method": "full"},
        {"prompt": name, "method": name},
        {"prompt": name, "profile": name},
        {"prompt": name, "model": name},
        {name: name},
        {"prompt": "w " * 3_000},
    ]


async def send_everything(client: httpx.AsyncClient) -> None:
    """Send good, wrong and absurd requests to every route."""
    name = uuid.uuid4().hex
    for body in bodies():
        for route in (
            "/generate",
            "/tokenize",
            "/detokenize",
            "/v1/completions",
            "/v1/chat/completions",
            f"/{name}",
        ):
            await client.post(route, json=body, headers={"X-Request-Id": name, "Host": name})
    for path in (
        f"/v1/models/{name}",
        f"/generate?a={name}",
        f"/metrics?{name}",
        "/",
        f"/playground/{name}",
        f"/{name}/x",
    ):
        await client.get(path)
        await client.request(name[:8].upper(), path)
    await client.get("/v1/models")
    await client.get("/health/live")


async def test_labels_take_no_value_from_a_caller() -> None:
    """Ids, models, paths and methods of callers would each add series for ever."""
    app = create_app(settings_for_tests(), load_engine=FakeEngine().take_over)
    async with running(app) as client:
        await send_everything(client)
        before, num_before = await labels_of(client)
        await send_everything(client)
        after, num_after = await labels_of(client)
    assert set(after) <= set(ALLOWED)
    strange = {label: values - ALLOWED[label] for label, values in after.items()}
    assert not any(strange.values()), strange
    assert (after, num_after) == (before, num_before)
    assert num_after < MAX_SERIES
