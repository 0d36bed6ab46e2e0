"""What answers say of snapshots, who may keep out of them, and what a long wait for one does."""

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from app.api import delivery
from app.main import create_app
from app.settings import SettingsError
from snapkv_core import (
    QueueFullError,
    SnapshotUse,
    StoreError,
    StoreHeldBackError,
    TieredStore,
)
from tests.support.app_client import (
    fake_service,
    listening,
    running,
    settings_for_tests,
    until,
)
from tests.support.fake_engine import FakeEngine
from tests.support.logs import captured_log, events_named

USES: tuple[SnapshotUse, ...] = ("hit", "stored", "miss", "off")
BODY: dict[str, Any] = {"prompt": "a b c", "max_new_tokens": 2}


def frames_of(text: str) -> list[dict[str, Any]]:
    """Return the events of a stream, without its end."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data:")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("use", USES)
async def test_answers_and_streams_say_it(
    engine: FakeEngine, client: httpx.AsyncClient, use: SnapshotUse
) -> None:
    engine.behaviour.snapshot = use
    answer = await client.post("/generate", json=BODY)
    assert (answer.headers["X-Snapshot"], answer.json()["snapshot"]) == (use, use)
    stream = await client.post("/generate", json={**BODY, "stream": True})
    assert stream.headers["X-Snapshot"] == use
    *pieces, last = frames_of(stream.text)
    assert last["snapshot"] == use
    assert not any("snapshot" in piece for piece in pieces)


async def test_openai_clients_read_it(
    engine: FakeEngine, openai_client: openai.AsyncOpenAI
) -> None:
    engine.behaviour.snapshot = "hit"
    raw = await openai_client.completions.with_raw_response.create(model="fake", prompt="a b")
    assert raw.headers["X-Snapshot"] == "hit"
    assert raw.parse().model_extra["snapshot"] == "hit"  # type: ignore[index]
    chunks = await openai_client.completions.create(
        model="fake", prompt="a b", stream=True, stream_options={"include_usage": True}
    )
    *_, last = [chunk async for chunk in chunks]
    assert last.model_extra["snapshot"] == "hit"  # type: ignore[index]


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
async def test_a_request_may_keep_out_of_the_store(
    engine: FakeEngine, client: httpx.AsyncClient, path: str
) -> None:
    body = {"prompt": "a b c", **({"model": "fake"} if path.startswith("/v1") else {})}
    for more in ({}, {"snapshot": "auto"}, {"snapshot": "off"}):
        assert (await client.post(path, json={**body, **more})).status_code == 200
    namespaces = [request.snapshot_namespace for request in engine.requests]
    assert namespaces == ["default", "default", None]


async def test_lookups_are_logged(engine: FakeEngine) -> None:
    with captured_log() as log:
        async with fake_service(engine) as client:
            for use in USES:
                engine.behaviour.snapshot = use
                await client.post("/generate", json=BODY, headers={"X-Request-Id": use})
        lines = events_named(log, "snapshot_looked_up")
    found = [(line["request_id"], line["snapshot"], line["lookup_ms"]) for line in lines]
    assert found == [(use, use, 0.25) for use in ("hit", "stored", "miss")]


async def test_stream_that_waits_for_another_request_begins_meanwhile(
    engine: FakeEngine, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no header then; the last event says it."""
    monkeypatch.setattr(delivery, "OPENING_TIME_S", 0.01)
    engine.behaviour.snapshot = "hit"
    engine.behaviour.submit_s = 0.1
    stream = await client.post("/generate", json={**BODY, "stream": True})
    assert stream.status_code == 200
    assert "X-Snapshot" not in stream.headers
    *pieces, last = frames_of(stream.text)
    assert "".join(piece["text"] for piece in pieces) == " a b"
    assert last["snapshot"] == "hit"


async def test_refusal_after_such_a_wait_is_the_last_event(
    engine: FakeEngine, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "OPENING_TIME_S", 0.01)
    engine.behaviour.submit_s = 0.1
    engine.behaviour.queue_full = True
    stream = await client.post(
        "/generate", json={**BODY, "stream": True}, headers={"X-Request-Id": "late-refusal"}
    )
    assert stream.status_code == 200
    (event,) = [line for line in stream.text.splitlines() if line.startswith("data:")]
    found = json.loads(event.removeprefix("data: "))
    assert found["id"] == "late-refusal"
    assert found["error"]["code"] == "queue_full"
    assert str(QueueFullError(64, 2.5)) == found["error"]["message"]


async def test_client_that_leaves_while_it_waits_takes_nothing(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "OPENING_TIME_S", 0.01)
    engine.behaviour.submit_s = 30.0
    app = create_app(settings_for_tests(), engine)
    generation = app.state.parts.generation
    async with listening(app) as url, httpx.AsyncClient(base_url=url) as client:
        async with client.stream("POST", "/generate", json={**BODY, "stream": True}):
            assert generation.num_in_flight == 1  # the response has begun; the client goes
        await until(lambda: generation.num_in_flight == 0)
    assert engine.requests == []


async def test_the_app_gives_its_stores_to_the_engine_and_its_weights_a_name(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    engine = FakeEngine()
    settings = settings_for_tests(snapshot_memory_bytes=1_000_000, model=str(tmp_path))
    async with running(create_app(settings, load_engine=engine.take_over)) as client:
        assert isinstance(engine.store, TieredStore)
        assert len(engine.fingerprint) == 64
        engine.store.put("default", 64 * "a", b"blob")
        assert engine.store.get("default", 64 * "a") == b"blob"
        metrics = (await client.get("/metrics")).text
    assert "snapkv_snapshot_held_back 0.0" in metrics


async def test_without_a_store_nothing_is_hashed_or_looked_up() -> None:
    engine = FakeEngine()
    settings = settings_for_tests(model="/nowhere")
    async with running(create_app(settings, load_engine=engine.take_over)):
        assert (engine.store, engine.fingerprint) == (None, "")


async def test_what_the_cache_does_is_counted() -> None:
    engine = FakeEngine()
    app = create_app(settings_for_tests(), engine)
    snapshots = app.state.parts.metrics.snapshots
    snapshots.on_lookup("hit", 0.5, 1_000)
    snapshots.on_lookup("miss", 0.001, 0)
    snapshots.on_lookup("held_back", 0.0, 0)
    snapshots.on_write("stored", 2.0, 300)
    snapshots.on_write("failed", 2.0, 300)
    snapshots.on_write("dropped", 0.0, 0)
    snapshots.on_store_error("valkey", StoreError("valkey", "no connection"))
    snapshots.on_store_error("valkey", StoreHeldBackError("valkey"))
    engine.behaviour.snapshot = "hit"
    async with running(app) as client:
        await client.post("/generate", json=BODY)
        found = (await client.get("/metrics")).text.splitlines()
    for line in (
        'snapkv_snapshot_lookups_total{outcome="hit"} 1.0',
        'snapkv_snapshot_lookups_total{outcome="held_back"} 1.0',
        'snapkv_snapshot_lookups_total{outcome="timeout"} 0.0',
        'snapkv_snapshot_writes_total{outcome="stored"} 1.0',
        'snapkv_snapshot_writes_total{outcome="dropped"} 1.0',
        'snapkv_snapshot_bytes_total{direction="fetched"} 1000.0',
        'snapkv_snapshot_bytes_total{direction="stored"} 300.0',
        'snapkv_snapshot_lookup_seconds_sum{outcome="hit"} 0.5',
        'snapkv_snapshot_lookup_seconds_count{outcome="no_hit"} 1.0',
        "snapkv_snapshot_write_seconds_count 2.0",
        'snapkv_snapshot_store_errors_total{store="valkey"} 1.0',
        'snapkv_snapshot_store_errors_total{store="s3"} 0.0',
        "snapkv_snapshot_fetch_bytes_per_second 0.0",
    ):
        assert line in found


def test_settings_that_do_not_go_together_stop_the_start() -> None:
    with pytest.raises(SettingsError, match="SNAPKV_SNAPSHOT_VALKEY_CA_FILE: needs"):
        create_app(settings_for_tests(snapshot_valkey_ca_file="/ca.pem"))
