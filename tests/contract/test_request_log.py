"""The request log through the service: an item per generation, and answers that do not need it."""

import asyncio
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.main import create_app
from app.settings import SettingsError
from tests.support.app_client import fake_service, running, settings_for_tests, until
from tests.support.aws import (
    ScriptedAws,
    create_request_log_table,
    error,
    items_of,
    moto_server,
    use_aws,
)
from tests.support.fake_engine import FakeEngine
from tests.support.logs import captured_log, events_named
from tests.support.served import example_environment, started, wait_until_ready

SECRET = "xyzzy-secret"
COMPRESSED = {"prompt": f"{SECRET} " * 1_024, "max_new_tokens": 4}


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    """Run moto's server."""
    with moto_server() as url:
        yield url


@pytest.fixture
def table(moto: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """Create a table of this test."""
    use_aws(monkeypatch, moto)
    name: str = request.node.name.partition("[")[0]
    create_request_log_table(moto, name)
    return name


def plain(item: dict[str, dict[str, str]]) -> dict[str, str]:
    """Strip DynamoDB's types off an item."""
    return {name: next(iter(value.values())) for name, value in item.items()}


async def test_each_generation_is_one_item(moto: str, table: str) -> None:
    """Plain, streamed, compressed or not, one answer or several, failed: all that was admitted."""
    engine = FakeEngine()
    begun_s = time.time()
    async with fake_service(engine, request_log_table=table, request_log_ttl_days=2) as client:
        bodies: dict[str, dict[str, Any]] = {
            "whole": COMPRESSED,
            "streamed": {"prompt": "a b", "stream": True},
            "choices": {"prompt": "a b c", "n": 2, "kernel_size": 5, "max_capacity_prompt": 40},
        }
        for name, body in bodies.items():
            await client.post("/generate", json=body, headers={"X-Request-Id": name})
        engine.behaviour.fail_after = 1
        await client.post("/generate", json={"prompt": "a b"}, headers={"X-Request-Id": "failed"})
    items = {item["request_id"]: item for item in map(plain, items_of(moto, table))}
    assert items.keys() == {"whole", "streamed", "choices", "failed"}
    assert {name: item["status"] for name, item in items.items()} == {
        "whole": "length",
        "streamed": "stop",
        "choices": "stop",
        "failed": "error",
    }
    whole = items["whole"]
    assert begun_s + 2 * 86_400 - 1 <= int(whole["expires_at"]) <= time.time() + 2 * 86_400
    assert whole["started_at"].startswith(f"{whole['day']}T")
    del whole["expires_at"], whole["started_at"], whole["day"]
    assert whole == {
        "request_id": "whole",
        "model": "fake",
        "status": "length",
        "num_choices": "1",
        "input_tokens": "1024",
        "output_tokens": "4",
        "method": "snapkv",
        "max_capacity_prompt": "512",
        "window_size": "16",
        "kernel_size": "15",
        "pooling": "max",
        "snapshot": "off",
        "original_entries": "1024",
        "compressed_entries": "512.0",
        "compression_ratio": "2.0",
        "original_bytes": str(1_024 * 64),
        "compressed_bytes": str(512 * 64),
        "kept_attention_mass": "0.9",
        "queue_ms": "1.0",
        "prefill_ms": "20.0",
        "decode_ms": "30.0",
        "time_to_first_token_ms": "21.0",
        "duration_ms": "51.0",
    }
    assert items["streamed"]["compression_skipped"] == "prompt_fits_capacity"
    assert (items["choices"]["num_choices"], items["choices"]["output_tokens"]) == ("2", "6")
    assert (items["choices"]["kernel_size"], items["choices"]["pooling"]) == ("5", "max")


async def test_refused_requests_are_not_generations(moto: str, table: str) -> None:
    """What was never admitted has no item."""
    engine = FakeEngine()
    async with fake_service(engine, request_log_table=table) as client:
        assert (await client.post("/generate", json={"prompt": ""})).status_code == 422
        engine.behaviour.queue_full = True
        assert (await client.post("/generate", json={"prompt": "a"})).status_code == 429
    assert items_of(moto, table) == []


async def test_items_hold_no_text(moto: str, table: str) -> None:
    """Neither prompt nor answer nor stop string."""
    async with fake_service(FakeEngine(), request_log_table=table) as client:
        await client.post("/generate", json={"prompt": SECRET, "stop": [SECRET]})
        await client.post("/generate", json={"prompt": SECRET, "explain": True, "stream": True})
    items = items_of(moto, table)
    assert len(items) == 2
    assert SECRET not in json.dumps(items)


async def test_one_id_for_many_requests(moto: str, table: str) -> None:
    """Callers who use an id again get an item each time."""
    async with fake_service(FakeEngine(), request_log_table=table) as client:
        for _ in range(3):
            await client.post("/generate", json={"prompt": "a"}, headers={"X-Request-Id": "mine"})
    items = [plain(item) for item in items_of(moto, table)]
    assert [item["request_id"] for item in items] == ["mine"] * 3
    assert len({item["started_at"] for item in items}) == 3


async def counted(client: httpx.AsyncClient) -> dict[str, float]:
    """Return the items counted so far, by outcome."""
    text = (await client.get("/metrics")).text
    lines = [
        line for line in text.splitlines() if line.startswith("snapkv_request_log_items_total")
    ]
    return {line.split('"')[1]: float(line.split()[-1]) for line in lines}


async def test_items_are_counted(table: str) -> None:
    """From zero, by outcome."""
    app = create_app(settings_for_tests(request_log_table=table), FakeEngine())
    async with running(app) as client:
        assert await counted(client) == {"written": 0, "dropped": 0, "failed": 0}
        for _ in range(25):
            await client.post("/generate", json={"prompt": "a"})
        async with asyncio.timeout(10):
            while (await counted(client))["written"] < 25:  # noqa: ASYNC110  # over HTTP
                await asyncio.sleep(0.01)
        assert await counted(client) == {"written": 25, "dropped": 0, "failed": 0}


@pytest.mark.parametrize(
    "trouble",
    [
        None,
        error("ProvisionedThroughputExceededException"),
        error("ResourceNotFoundException"),
        lambda _body: (200, b"<html>hello, I am a proxy</html>"),
        "hang",
    ],
    ids=["refused", "throttled", "no-table", "garbage", "slow"],
)
async def test_answers_are_the_same_while_dynamodb_is_broken(
    trouble: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody who asks for an answer notices, and the end of the process is not held up."""
    monkeypatch.setattr("app.main.FLUSH_TIMEOUT_S", 0.5)
    async with fake_service(FakeEngine()) as client:
        expected = (await client.post("/generate", json=COMPRESSED)).json()
    with ScriptedAws(lambda _body: (200, {})) as aws, captured_log() as log:
        aws.answer = aws.hang if trouble == "hang" else trouble
        use_aws(monkeypatch, "http://127.0.0.1:9" if trouble is None else aws.url)
        app = create_app(settings_for_tests(request_log_table="requests"), FakeEngine())
        async with running(app) as client:
            begun_s = time.monotonic()
            for _ in range(30):
                answer = await client.post("/generate", json=COMPRESSED)
                assert answer.status_code == 200
                assert answer.json() | {"id": ""} == expected | {"id": ""}
            if trouble is not None:
                await until(lambda: aws.requests)
            assert time.monotonic() - begun_s < 10
            ended_s = time.monotonic()
        assert time.monotonic() - ended_s < 5
        lost = events_named(log, "request_log_items_lost")
        assert sum(line["num_items"] for line in lost) == 30
        assert SECRET not in log.getvalue()


async def test_client_that_leaves_has_an_item(moto: str, table: str) -> None:
    """An abort is a generation, too."""
    engine = FakeEngine()
    engine.behaviour.stall_after = 1
    async with fake_service(engine, request_log_table=table) as client:
        asking = asyncio.create_task(client.post("/generate", json={"prompt": "a b c"}))
        await until(lambda: engine.num_running)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(lambda: engine.aborted)
    (item,) = map(plain, items_of(moto, table))
    assert item["status"] == "abort"
    assert "compression_ratio" not in item


def test_missing_region_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before any model is loaded."""
    use_aws(monkeypatch, "http://127.0.0.1:9")
    monkeypatch.delenv("AWS_REGION")
    with pytest.raises(SettingsError, match="set AWS_REGION"):
        create_app(settings_for_tests(request_log_table="requests"), FakeEngine())


@pytest.mark.slow
def test_signal_loses_no_item(moto: str, table: str, tmp_path: Path) -> None:
    """The answer that a drain waited for is in the table when the process has ended."""
    environment = example_environment(tmp_path) | {"SNAPKV_REQUEST_LOG_TABLE": table}
    arguments = ["-m", "tests.support.fake_server", "0", "0.05"]
    log = tmp_path / "server.log"
    with started(arguments, environment, log) as (process, address):
        wait_until_ready(process, address, log, 60)
        url = f"http://{address}"
        for _ in range(3):
            httpx.post(f"{url}/generate", json={"prompt": "a"})
        body = {"prompt": "w " * 20, "stream": True}
        with httpx.stream("POST", f"{url}/generate", json=body, timeout=30) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert "data: [DONE]" in list(lines)
        assert process.wait(timeout=30) == 0
    assert [item["status"]["S"] for item in items_of(moto, table)].count("stop") == 4
