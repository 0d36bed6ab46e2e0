"""The engine's thread dies of a fault of its own: every stream ends, and everybody is told."""

import asyncio

import pytest

from app.main import create_app
from snapkv_core import AsyncEngine, EngineStoppedError, FinishReason
from tests.support.app_client import running, settings_for_tests, until
from tests.support.engines import make_engine, make_request
from tests.support.models import build_model, random_prompt

REASON = "the engine failed; the service must be restarted"


def engine_that_dies(monkeypatch: pytest.MonkeyPatch, after_steps: int) -> AsyncEngine:
    """Return an engine whose step raises, outside of what it handles itself."""
    inner = make_engine(build_model("llama", 2, seed=51), max_num_seqs=2)
    step, num_steps = inner.step, 0

    def die() -> object:
        nonlocal num_steps
        num_steps += 1
        if num_steps > after_steps:
            raise RuntimeError("a fault in the loop itself")
        return step()

    monkeypatch.setattr(inner, "step", die)
    return AsyncEngine(inner)


async def test_every_stream_ends_and_new_ones_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that run, and those that wait for a place."""
    engine = engine_that_dies(monkeypatch, after_steps=20)
    engine.start()
    streams = [
        await engine.submit(
            make_request(random_prompt(40, seed=seed), max_new_tokens=500, ignore_eos=True)
        )
        for seed in range(4)
    ]
    async with asyncio.timeout(30):
        answers = [[event async for event in stream] for stream in streams]
    assert len(answers[0]) > 1
    assert [len(events) for events in answers[2:]] == [1, 1]
    for events in answers:
        assert (events[-1].finish_reason, events[-1].error) == (FinishReason.ERROR, REASON)
        assert events[-1].summary is not None
    assert not engine.stats().is_alive
    await until(lambda: engine.stats().num_running + engine.stats().num_waiting == 0)
    with pytest.raises(EngineStoppedError):
        await engine.submit(make_request("hi"))
    engine.stop()


async def test_service_around_it_is_dead_to_health_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever restarts services by `/health/live` restarts this one."""
    engine = engine_that_dies(monkeypatch, after_steps=0)
    async with running(create_app(settings_for_tests(), engine)) as client:
        assert (await client.get("/health/live")).status_code == 200
        async with asyncio.timeout(30):
            failed = await client.post("/generate", json={"prompt": "hi"})
        # Nothing of it was answered, so another replica may take it.
        assert (failed.status_code, failed.json()["error"]["code"]) == (503, "engine_stopped")
        assert not engine.stats().is_alive
        assert (await client.get("/health/live")).status_code == 503
        assert (await client.get("/health/ready")).json() == {"status": "dead"}
        refused = await client.post("/generate", json={"prompt": "hi"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_stopped")
