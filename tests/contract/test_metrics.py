"""The metrics page: names that dashboards read, values that follow the requests."""

import asyncio
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from app.main import create_app
from app.telemetry.metrics import ERROR_REASONS, OTHER_REASON, ServiceMetrics
from snapkv_core import EngineStats, FinishReason, StepStats
from tests.support.app_client import fake_service, running, settings_for_tests, until
from tests.support.fake_engine import FakeEngine, load_fake_engine
from tests.support.markdown import ROOT

EXPECTED = {
    "snapkv_requests",
    "snapkv_request_seconds",
    "snapkv_request_errors",
    "snapkv_answers",
    "snapkv_prompt_tokens",
    "snapkv_output_tokens",
    "snapkv_step_tokens",
    "snapkv_queue_seconds",
    "snapkv_prefill_seconds",
    "snapkv_model_info",
    "snapkv_engine_alive",
    "snapkv_engine_last_step_age_seconds",
    "snapkv_sequences_running",
    "snapkv_requests_waiting",
    "snapkv_compression_ratio",
    "snapkv_kept_attention_mass",
    "snapkv_prompts",
    "snapkv_kv_bytes",
    "snapkv_pages",
    "snapkv_prefill_workspace_bytes",
    "snapkv_device_memory_bytes",
    "snapkv_prefill_step_seconds",
    "snapkv_decode_step_seconds",
    "snapkv_decode_batch_size",
    "snapkv_kv_original_bytes",
    "snapkv_kv_compressed_bytes",
    "snapkv_weights_bytes",
    "snapkv_weights_download_seconds",
    "snapkv_request_log_items",
    "snapkv_settings_refreshes",
    "snapkv_traces_lost",
    "snapkv_prefill_tokens_per_second",
    "snapkv_snapshot_bytes",
    "snapkv_snapshot_fetch_bytes_per_second",
    "snapkv_snapshot_held_back",
    "snapkv_snapshot_lookup_seconds",
    "snapkv_snapshot_lookups",
    "snapkv_snapshot_pending_bytes",
    "snapkv_snapshot_requests",
    "snapkv_snapshot_round_trip_seconds",
    "snapkv_snapshot_store_errors",
    "snapkv_snapshot_write_seconds",
    "snapkv_snapshot_writes",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:e2e_request_latency_seconds",
}


Samples = dict[tuple[str, tuple[tuple[str, str], ...]], Any]


def samples_of(text: str) -> Samples:
    """Return every sample by name and sorted labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def of_model(name: str) -> tuple[tuple[str, str], ...]:
    """Return the labels of metrics that bear names of other servers."""
    return (("model_name", name),)


async def scrape(client: httpx.AsyncClient) -> Samples:
    """Fetch the page."""
    answer = await client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return samples_of(answer.text)


def by_label(samples: Samples, name: str, label: str) -> dict[str, float]:
    """Return the values of one metric by the value of its one label."""
    return {
        dict(labels)[label]: value for (found, labels), value in samples.items() if found == name
    }


async def test_page_parses_and_has_the_documented_names() -> None:
    """Each metric is there from the start, so that an alert on it can be written."""
    app = create_app(settings_for_tests(), load_engine=load_fake_engine)
    async with running(app) as client:
        text = (await client.get("/metrics")).text
    names = {family.name for family in text_string_to_metric_families(text)}
    # The client library adds the time at which each counter began.
    assert {name for name in names if not name.endswith("_created")} == EXPECTED


async def test_values_follow_the_requests() -> None:
    """Counters and histograms count each request once, by its route and outcome."""
    app = create_app(settings_for_tests(), load_engine=load_fake_engine)
    async with running(app) as client:
        await client.post("/generate", json={"prompt": "w " * 1_024, "max_new_tokens": 4})
        await client.post("/generate", json={"prompt": "a b"})
        await client.post("/generate", json={"prompt": ""})
        await client.get("/nowhere/secret")
        samples = await scrape(client)

    def requests(route: str, outcome: str) -> float:
        labels = (("outcome", outcome), ("route", route))
        return float(samples["snapkv_requests_total", labels])

    assert requests("/generate", "success") == 2
    assert requests("/generate", "invalid") == 1
    assert requests("unmatched", "invalid") == 1
    assert samples["snapkv_prompt_tokens_total", ()] == 1_026
    assert samples["snapkv_output_tokens_total", ()] == 6
    assert samples["snapkv_compression_ratio_sum", ()] == 2.0
    assert samples["snapkv_compression_ratio_count", ()] == 1
    assert samples["snapkv_kv_original_bytes_total", ()] == 1_026 * 64
    assert samples["vllm:time_to_first_token_seconds_count", of_model("fake")] == 2
    assert samples["vllm:e2e_request_latency_seconds_sum", of_model("fake")] == 0.102
    assert samples["snapkv_engine_alive", ()] == 1
    assert samples["snapkv_model_info", (("model", "fake"),)] == 1
    assert samples["vllm:num_requests_running", of_model("fake")] == 0


async def test_two_apps_count_apart() -> None:
    """Each app has a registry of its own."""
    first = create_app(settings_for_tests(), load_engine=load_fake_engine)
    second = create_app(settings_for_tests(), load_engine=load_fake_engine)
    async with running(first) as client, running(second) as other:
        await client.post("/generate", json={"prompt": "a"})
        assert (await scrape(client))["snapkv_prompt_tokens_total", ()] == 1
        assert (await scrape(other))["snapkv_prompt_tokens_total", ()] == 0


def stats_with(**values: Any) -> EngineStats:
    """Return numbers that are all different."""
    numbers: dict[str, Any] = {
        "num_waiting": 3,
        "num_running": 5,
        "kv_bytes": 40 * 256,
        "num_pages_used": 40,
        "num_pages_reserved": 70,
        "num_pages_total": 160,
        "page_bytes": 256,
        "workspace_bytes": 11_000,
        "device_memory_bytes": 22_000,
        "last_step_age_s": 0.75,
        "is_alive": True,
    }
    return EngineStats(**(numbers | values))


def test_gauges_show_the_engine_of_one_moment() -> None:
    """Each scrape asks the engine once, so that used never exceeds reserved or total."""
    metrics = ServiceMetrics()
    asked: list[EngineStats] = []

    def stats() -> EngineStats:
        asked.append(stats_with())
        return asked[-1]

    metrics.engine.watch(stats, "m")
    samples = samples_of(metrics.render().decode())
    assert len(asked) == 1
    assert by_label(samples, "snapkv_pages", "state") == {"used": 40, "reserved": 70, "total": 160}
    assert by_label(samples, "snapkv_kv_bytes", "state") == {
        "allocated": 10_240,
        "reserved": 17_920,
        "total": 40_960,
    }
    assert samples["vllm:kv_cache_usage_perc", of_model("m")] == 0.25
    assert samples["vllm:num_requests_running", of_model("m")] == 5
    assert samples["vllm:num_requests_waiting", of_model("m")] == 3
    assert samples["snapkv_sequences_running", ()] == 5
    assert samples["snapkv_requests_waiting", ()] == 3
    assert samples["snapkv_prefill_workspace_bytes", ()] == 11_000
    assert samples["snapkv_device_memory_bytes", ()] == 22_000
    assert samples["snapkv_engine_last_step_age_seconds", ()] == 0.75
    assert samples["snapkv_engine_alive", ()] == 1


def test_a_pool_without_pages_is_empty_and_no_division_by_zero() -> None:
    """Before the model is loaded, and in an engine that has no pool, usage is 0."""
    metrics = ServiceMetrics()
    assert samples_of(metrics.render().decode())["vllm:kv_cache_usage_perc", of_model("")] == 0
    metrics.engine.watch(lambda: stats_with(num_pages_used=0, num_pages_total=0), "m")
    assert samples_of(metrics.render().decode())["vllm:kv_cache_usage_perc", of_model("m")] == 0


def test_steps_are_counted_by_what_they_did() -> None:
    """A phase that a step did not run adds no observation to its histogram."""
    metrics = ServiceMetrics()
    for step in (
        StepStats(0.5, 0.4, 0.0, 12.5, 0),
        StepStats(0.25, 0.0, 0.25, 0.0, 3),
        StepStats(1.0, 0.5, 0.25, 7.5, 4),
    ):
        metrics.engine.on_step(step)
    samples = samples_of(metrics.render().decode())

    def histogram(name: str) -> tuple[float, float]:
        labels = of_model("") if name.startswith("vllm:") else ()
        return samples[f"{name}_count", labels], samples[f"{name}_sum", labels]

    assert histogram("snapkv_prefill_step_seconds") == (2, 0.9)
    assert histogram("snapkv_decode_step_seconds") == (2, 0.5)
    assert histogram("snapkv_decode_batch_size") == (2, 7)
    assert histogram("vllm:inter_token_latency_seconds") == (2, 1.25)
    assert by_label(samples, "snapkv_step_tokens_total", "phase") == {"prefill": 20, "decode": 7}
    assert samples["snapkv_decode_batch_size_bucket", (("le", "2.0"),)] == 0
    assert samples["snapkv_decode_batch_size_bucket", (("le", "4.0"),)] == 2


async def test_errors_are_counted_by_reason() -> None:
    """Each refusal and failure has a reason of a fixed set, the streaming ones included."""
    engine = FakeEngine()
    behaviour = engine.behaviour
    async with fake_service(engine) as client:

        async def post(body: dict[str, Any], **headers: str) -> int:
            return (await client.post("/generate", json=body, headers=headers)).status_code

        assert await post({"prompt": ""}) == 422
        assert await post({"prompt": "w " * 2_000}) == 400
        assert await post({"prompt": "a", "max_new_tokens": 1_700}) == 400
        behaviour.queue_full = True
        assert await post({"prompt": "a"}) == 429
        assert await post({"prompt": "a", "stream": True}) == 429
        behaviour.queue_full = False
        behaviour.crash_on_submit = True
        assert await post({"prompt": "a"}) == 500
        behaviour.crash_on_submit = False
        behaviour.fail_after = 1
        assert await post({"prompt": "a b", "stream": True}) == 200
        behaviour.fail_after = None
        behaviour.stall_after = 1
        late = {"X-Request-Timeout": "0.05"}
        assert await post({"prompt": "a b"}, **late) == 504
        assert await post({"prompt": "a b", "stream": True}, **late) == 200
        reasons = by_label(await scrape(client), "snapkv_request_errors_total", "reason")
    assert set(reasons) == {*ERROR_REASONS, OTHER_REASON}
    assert {reason: count for reason, count in reasons.items() if count} == {
        "invalid_value": 1,
        "prompt_too_long": 1,
        "request_too_large": 1,
        "queue_full": 2,
        "internal_error": 1,
        "generation_failed": 1,
        "deadline_exceeded": 2,
    }


async def test_draining_server_counts_whom_it_sends_away() -> None:
    """A refusal for the sake of the shutdown is told from a full queue."""
    engine = FakeEngine()
    app = create_app(settings_for_tests(), engine)
    async with running(app) as client:
        host, service = app.state.parts.engine_host, app.state.parts.generation
        engine.behaviour.stall_after = 0
        hanging = asyncio.create_task(client.post("/generate", json={"prompt": "a"}))
        await until(lambda: service.num_in_flight == 1)
        draining = asyncio.create_task(host.drain(30, lambda: service.num_in_flight, lambda: False))
        await until(lambda: host.state == "draining")
        answer = await client.post("/generate", json={"prompt": "a"})
        assert answer.status_code == 503
        reasons = by_label(await scrape(client), "snapkv_request_errors_total", "reason")
        assert reasons["draining"] == 1
        engine.stop()
        assert (await hanging).status_code == 503
        await draining


def test_code_that_nobody_listed_is_other() -> None:
    """Labels stay a fixed set whatever a later version answers with."""
    metrics = ServiceMetrics()
    metrics.count_request("/generate", "error", "brand_new", 0.1)
    metrics.count_request("/generate", "success", None, 0.1)
    reasons = by_label(
        samples_of(metrics.render().decode()), "snapkv_request_errors_total", "reason"
    )
    assert {reason: count for reason, count in reasons.items() if count} == {OTHER_REASON: 1}


async def test_answers_are_counted_by_every_finish_reason() -> None:
    """A request that ran out of time is told from one that failed."""
    engine = FakeEngine()
    app = create_app(settings_for_tests(), load_engine=engine.take_over)
    async with running(app) as client:
        before = by_label(await scrape(client), "snapkv_answers_total", "finish_reason")
        assert before == dict.fromkeys((reason.value for reason in FinishReason), 0)
        await client.post("/generate", json={"prompt": "a b", "n": 2})
        engine.behaviour.stall_after = 0
        await client.post(
            "/generate", json={"prompt": "a b"}, headers={"X-Request-Timeout": "0.01"}
        )
        after = by_label(await scrape(client), "snapkv_answers_total", "finish_reason")
    assert after == before | {"stop": 2, "deadline": 1}


async def test_price_is_there_when_it_is_set() -> None:
    """Cost per token is computed from it; a machine without a price must not look free."""
    async with fake_service(FakeEngine(), price_per_hour=1.459) as client:
        assert (await scrape(client))["snapkv_price_per_hour", ()] == 1.459
    async with fake_service(FakeEngine()) as client:
        assert ("snapkv_price_per_hour", ()) not in await scrape(client)


def test_documentation_names_every_metric() -> None:
    """Whoever draws another panel finds names and meanings."""
    page = (ROOT / "docs" / "logs.md").read_text(encoding="utf-8")
    assert not {name for name in EXPECTED | {"snapkv_price_per_hour"} if name not in page}
