"""The metrics page: names that dashboards read, values that follow the requests."""

from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from app.main import create_app
from tests.support.app_client import running, settings_for_tests
from tests.support.fake_engine import load_fake_engine

EXPECTED = {
    "snapkv_requests",
    "snapkv_request_seconds",
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
    "snapkv_kv_original_bytes",
    "snapkv_kv_compressed_bytes",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:e2e_request_latency_seconds",
}


async def scrape(client: httpx.AsyncClient) -> dict[tuple[str, tuple[tuple[str, str], ...]], Any]:
    """Return every sample by name and sorted labels."""
    answer = await client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
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
    assert samples["vllm:time_to_first_token_seconds_count", ()] == 2
    assert samples["vllm:e2e_request_latency_seconds_sum", ()] == 0.102
    assert samples["snapkv_engine_alive", ()] == 1
    assert samples["snapkv_model_info", (("model", "fake"),)] == 1
    assert samples["vllm:num_requests_running", ()] == 0


async def test_two_apps_count_apart() -> None:
    """Each app has a registry of its own."""
    first = create_app(settings_for_tests(), load_engine=load_fake_engine)
    second = create_app(settings_for_tests(), load_engine=load_fake_engine)
    async with running(first) as client, running(second) as other:
        await client.post("/generate", json={"prompt": "a"})
        assert (await scrape(client))["snapkv_prompt_tokens_total", ()] == 1
        assert (await scrape(other))["snapkv_prompt_tokens_total", ()] == 0
