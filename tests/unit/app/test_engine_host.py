"""The engine's life in the process: loading, draining, stalling, stopping."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from app.services import engine_host
from app.services.engine_host import EngineHost, EngineNotReadyError, EngineState
from app.services.ports import GenerationEngine
from snapkv_core import CompressionConfig, EngineStoppedError
from tests.support.app_client import until
from tests.support.fake_engine import FakeEngine


def host_of(load: Callable[[], GenerationEngine], failures: list[str] | None = None) -> EngineHost:
    """Return a host that counts an engine as stalled after 60 seconds."""
    return EngineHost(
        load,
        on_ready=lambda _engine: None,
        on_failed=(failures if failures is not None else []).append,
        default_compression=CompressionConfig(),
        stall_timeout_s=60,
    )


async def ready_host(engine: FakeEngine) -> EngineHost:
    """Return a host that serves."""
    host = host_of(lambda: engine)
    host.start()
    await until(lambda: host.state is EngineState.READY)
    return host


async def test_readiness_tells_a_stalled_engine_from_a_dead_one() -> None:
    """A step that takes too long is a reason to send requests elsewhere, not to restart."""
    engine = FakeEngine()
    host = await ready_host(engine)
    assert host.readiness == "ready"
    engine.last_step_age_s = 60.0
    assert host.readiness == "ready"
    engine.last_step_age_s = 60.1
    assert (host.readiness, host.is_alive) == ("stalled", True)
    assert host.engine() is engine
    engine.last_step_age_s = 0.0
    assert host.readiness == "ready"
    engine.stop()
    assert (host.readiness, host.is_alive) == ("dead", False)


async def test_drain_waits_for_the_last_request_and_takes_no_new_one() -> None:
    """The engine lives until the requests in flight are answered, and is stopped then."""
    engine = FakeEngine()
    host = await ready_host(engine)
    in_flight = [2]
    draining = asyncio.create_task(host.drain(30, lambda: in_flight[0], lambda: False))
    await until(lambda: host.state is EngineState.DRAINING)
    assert (host.readiness, host.is_alive, engine.is_alive) == ("draining", True, True)
    with pytest.raises(EngineNotReadyError, match="shutting down") as refused:
        host.engine()
    assert refused.value.state is EngineState.DRAINING
    in_flight[0] = 1
    await asyncio.sleep(0.1)
    assert not draining.done()
    in_flight[0] = 0
    await asyncio.wait_for(draining, 5)
    assert (host.state, engine.is_alive) == (EngineState.STOPPED, False)
    with pytest.raises(EngineStoppedError):
        host.engine()


async def test_drain_ends_at_its_limit() -> None:
    """Requests that take too long do not keep the engine."""
    engine = FakeEngine()
    host = await ready_host(engine)
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    await asyncio.wait_for(host.drain(0.2, lambda: 1, lambda: False), 5)
    assert loop.time() - started_s >= 0.2
    assert (host.state, engine.is_alive) == (EngineState.STOPPED, False)


async def test_hurry_ends_a_drain() -> None:
    """It is asked for again and again, so that a signal can set it."""
    engine = FakeEngine()
    host = await ready_host(engine)
    hurry = threading.Event()
    draining = asyncio.create_task(host.drain(3_600, lambda: 1, hurry.is_set))
    await until(lambda: host.state is EngineState.DRAINING)
    hurry.set()
    await asyncio.wait_for(draining, 5)
    assert not engine.is_alive


async def test_drain_while_loading_stops_and_the_late_engine_never_starts() -> None:
    """A signal does not wait for a model, and what loads afterwards serves nobody."""
    may_load, loaded = threading.Event(), threading.Event()
    engine = FakeEngine()

    def load() -> FakeEngine:
        may_load.wait(10)
        loaded.set()
        return engine

    host = host_of(load)
    host.start()
    assert host.is_alive
    await asyncio.wait_for(host.drain(3_600, lambda: 1, lambda: False), 5)
    assert host.state is EngineState.STOPPED
    may_load.set()
    await until(loaded.is_set)
    await asyncio.sleep(0.05)
    assert (host.state, engine.is_alive) == (EngineState.STOPPED, False)


async def test_failure_to_load_is_told_unless_the_server_stops_anyway() -> None:
    """Nobody needs to hear of it after the stop."""

    def load() -> FakeEngine:
        raise RuntimeError("odd")

    failures: list[str] = []
    host = host_of(load, failures)
    host.start()
    await until(lambda: failures)
    assert failures == ["loading the model raised RuntimeError"]
    assert (host.readiness, host.is_alive) == ("failed", False)
    with pytest.raises(EngineNotReadyError):
        host.engine()
    stopped = host_of(load, failures)
    await stopped.stop()
    stopped.start()
    await asyncio.sleep(0.1)
    assert (len(failures), stopped.state) == (1, EngineState.STOPPED)


async def test_engine_that_hangs_cannot_keep_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopping is given up after a while; a second stop asks the engine no more."""
    monkeypatch.setattr(engine_host, "STOP_TIMEOUT_S", 0.1)
    may_stop = threading.Event()
    calls: list[int] = []

    class Hanging(FakeEngine):
        def stop(self) -> None:
            calls.append(1)
            may_stop.wait(10)

    host = await ready_host(Hanging())
    await asyncio.wait_for(host.stop(), 5)
    await host.stop()
    assert (host.state, calls) == (EngineState.STOPPED, [1])
    may_stop.set()
