"""The whole API, fuzzed by its own description: nothing is answered that it does not announce.

Requests are drawn by schemathesis from the description that the service gives of itself, so a
route or a field that is added is covered from then on.
"""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any, Final

import httpx
import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.config import SchemathesisConfig
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    ignored_auth,
    missing_required_header,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from app.main import create_app
from snapkv_core import EngineConfig, EngineObserver
from tests.support.app_client import listening, settings_for_tests
from tests.support.fake_engine import FakeBehaviour, FakeEngine
from tests.support.logs import captured_log

MODEL: Final = "demo"
KEY: Final = "a-key-of-27-characters-long"
WITH_KEY: Final = {"Authorization": f"Bearer {KEY}"}
CONFORMANCE: Final = (
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
)
#: All but `positive_data_acceptance`: that a capacity exceeds its window, or that a prompt fits
#: the context, no schema can say.
CHECKS: Final = (
    not_a_server_error,
    *CONFORMANCE,
    negative_data_rejection,
    missing_required_header,
    unsupported_method,
    ignored_auth,
)
REPEATABLE: Final = settings(
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def build(behaviour: FakeBehaviour, request_timeout_s: float = 600.0) -> FastAPI:
    """Build the service around a fake engine, open to whoever has the key."""
    config = EngineConfig(request_timeout_s=request_timeout_s)
    engine = FakeEngine(config=config, model_name=MODEL, behaviour=behaviour)
    return create_app(settings_for_tests(api_keys=[KEY]), engine)


def description() -> dict[str, Any]:
    """Return the service's own description, with the served model's name as the only one.

    Hardly any drawn name would be that of the model, and all that were not would be refused.
    """
    document = create_app(settings_for_tests()).openapi()
    for schema in document["components"]["schemas"].values():
        model = schema.get("properties", {}).get("model", {})
        if model.get("type") == "string":
            model["enum"] = [MODEL]
    return document


def never_loads(config: EngineConfig, observer: EngineObserver) -> FakeEngine:
    """Load for longer than any test takes."""
    del config, observer
    _over.wait(300)
    return FakeEngine()


_over = threading.Event()
SCHEMA = schemathesis.openapi.from_dict(description())
#: Drawn requests alone, without those that work through every method, header and boundary.
DRAWN_ONLY = schemathesis.openapi.from_dict(
    description(),
    config=SchemathesisConfig.from_dict({"phases": {"coverage": {"enabled": False}}}),
)


@pytest.fixture(scope="module")
def urls() -> Iterator[dict[str, str]]:
    """Serve one app in each state on a loop of its own; yields their URLs by state."""
    apps = {
        "well": build(FakeBehaviour()),
        "queue full": build(FakeBehaviour(queue_full=True)),
        "crashing": build(FakeBehaviour(crash_on_submit=True)),
        "failing": build(FakeBehaviour(fail_after=0)),
        "late": build(FakeBehaviour(stall_after=0), request_timeout_s=0.05),
        "loading": create_app(settings_for_tests(api_keys=[KEY]), load_engine=never_loads),
    }
    found: dict[str, str] = {}
    are_listening = threading.Event()
    loop = asyncio.new_event_loop()
    stopping = asyncio.Event()

    async def serve() -> None:
        async with AsyncExitStack() as stack:
            for state, app in apps.items():
                is_ready = state != "loading"
                found[state] = await stack.enter_async_context(listening(app, wait_ready=is_ready))
            are_listening.set()
            await stopping.wait()
            _over.set()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        # Of unexpected errors structlog's own log draws pictures, which take seconds.
        with captured_log("error"):
            assert are_listening.wait(60)
            yield found
            assert_serves(found["well"])
    finally:
        loop.call_soon_threadsafe(stopping.set)
        thread.join(60)
        loop.close()


def assert_serves(url: str) -> None:
    """Check that the engine is alive and does what it should, after all that it was sent."""
    with httpx.Client(base_url=url, headers=WITH_KEY) as client:
        assert client.get("/health/live").json() == {"status": "alive"}
        answer = client.post("/generate", json={"prompt": "still there"})
        assert (answer.status_code, answer.json()["text"]) == (200, " still there")
        metrics = client.get("/metrics").text
    assert "snapkv_sequences_running 0.0" in metrics


@pytest.mark.slow
@SCHEMA.parametrize()
@settings(REPEATABLE, max_examples=25)
def test_no_request_gets_an_answer_that_is_not_described(case: Any, urls: dict[str, str]) -> None:
    """Right and wrong values, methods, headers and bodies: no 5xx, no unknown status or shape."""
    answer = case.call(base_url=urls["well"], headers=WITH_KEY)
    case.validate_response(answer, checks=list(CHECKS))


@pytest.mark.slow
@DRAWN_ONLY.parametrize()
@settings(REPEATABLE, max_examples=3)
def test_troubles_of_the_server_are_described(case: Any, urls: dict[str, str]) -> None:
    """A server that cannot answer, and one that may not, says so as the description has it."""
    for state, url in urls.items():
        headers = {} if state == "well" else WITH_KEY
        answer = case.call(base_url=url, headers=headers)
        case.validate_response(answer, checks=list(CONFORMANCE))
