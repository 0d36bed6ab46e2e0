"""Health checks, and what requests are told, in each stage of the engine's life."""

import threading

import httpx
import pytest

from app.main import create_app
from snapkv_core import EngineConfig, EngineObserver, ModelLoadError
from tests.contract.test_generate_errors import check_shape
from tests.support.app_client import fake_service, running, settings_for_tests, until
from tests.support.fake_engine import FakeEngine, load_fake_engine


async def test_stopped_engine_is_a_503_and_dead(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    """A dead engine refuses requests and fails both health checks."""
    engine.stop()
    answer = await client.post("/generate", json={"prompt": "a"})
    assert answer.status_code == 503
    assert "retry-after" in answer.headers
    assert check_shape(answer)["code"] == "engine_stopped"
    assert (await client.get("/health/live")).status_code == 503
    assert (await client.get("/health/ready")).json() == {"status": "dead"}


async def test_stalled_engine_is_not_ready_but_alive(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    """A step older than the limit sends new requests elsewhere until it ends."""
    engine.last_step_age_s = 61.0
    ready = await client.get("/health/ready")
    assert (ready.status_code, ready.json()) == (503, {"status": "stalled"})
    assert int(ready.headers["retry-after"]) >= 1
    assert (await client.get("/health/live")).status_code == 200
    engine.last_step_age_s = 59.0
    assert (await client.get("/health/ready")).status_code == 200


async def test_limit_of_a_stall_is_a_setting(engine: FakeEngine) -> None:
    """Who reads very long prompts in one step sets it higher."""
    async with fake_service(engine, stall_timeout_s=120) as client:
        engine.last_step_age_s = 119.0
        assert (await client.get("/health/ready")).status_code == 200
        engine.last_step_age_s = 121.0
        assert (await client.get("/health/ready")).json() == {"status": "stalled"}


async def test_loading_model_is_a_503_with_retry_after() -> None:
    """While the model loads the process is alive, not ready, and says so."""
    may_load = threading.Event()

    def load(config: EngineConfig, observer: EngineObserver) -> FakeEngine:
        may_load.wait(10)
        return load_fake_engine(config, observer)

    app = create_app(settings_for_tests(), load_engine=load)
    async with running(app, wait_ready=False) as client:
        assert (await client.get("/health/live")).status_code == 200
        ready = await client.get("/health/ready")
        assert (ready.status_code, ready.json()) == (503, {"status": "loading"})
        answer = await client.post("/generate", json={"prompt": "a"})
        assert (answer.status_code, check_shape(answer)["code"]) == (503, "engine_loading")
        assert int(answer.headers["retry-after"]) >= 1
        may_load.set()
        await until(lambda: app.state.parts.engine_host.state == "ready")
        ready = await client.get("/health/ready")
        assert ready.json() == {
            "status": "ready",
            "model": "fake",
            "max_model_len": 2_048,
            "device": "cpu",
            "dtype": "float32",
        }


@pytest.mark.parametrize("error", [ModelLoadError("no such\nmodel"), RuntimeError("odd")])
async def test_failed_load_is_told_in_one_line(error: Exception) -> None:
    """Whoever runs the server is told why, and health checks fail."""
    reasons: list[str] = []

    def load(*_: object) -> FakeEngine:
        raise error

    app = create_app(settings_for_tests(), load_engine=load, on_load_failed=reasons.append)
    async with running(app, wait_ready=False) as client:
        await until(lambda: reasons)
        assert (await client.get("/health/live")).status_code == 503
        assert (await client.get("/health/ready")).json() == {"status": "failed"}
        answer = await client.post("/generate", json={"prompt": "a"})
        assert (answer.status_code, check_shape(answer)["code"]) == (503, "engine_failed")
    assert len(reasons) == 1
    assert "\n" not in reasons[0]
