"""A second port for health and metrics: what is on which, and that it outlasts a drain."""

import signal
from pathlib import Path

import httpx
import pytest

from app.main import create_admin_app, create_app
from app.settings import SettingsError, load_settings
from tests.contract.test_shutdown import fake_server, wait_for
from tests.support.app_client import running, settings_for_tests
from tests.support.fake_engine import FakeEngine
from tests.support.served import free_port

KEY = "key-of-team-a-0123"
BODY = {"prompt": "a b", "max_new_tokens": 2}


async def test_metrics_are_on_the_second_port_only_and_health_on_both(engine: FakeEngine) -> None:
    app = create_app(settings_for_tests(admin_port=0, api_keys=[KEY]), engine)
    admin = httpx.ASGITransport(create_admin_app(app.state.parts))
    async with (
        running(app) as client,
        httpx.AsyncClient(transport=admin, base_url="http://admin") as admin_client,
    ):
        assert (await client.get("/metrics")).status_code == 404
        assert "/metrics" not in (await client.get("/openapi.json")).json()["paths"]
        for path in ("/health/live", "/health/ready"):
            answers = [await each.get(path) for each in (client, admin_client)]
            assert [answer.status_code for answer in answers] == [200, 200]
            assert answers[0].json() == answers[1].json()
        bearer = {"Authorization": f"Bearer {KEY}"}
        assert (await client.post("/generate", json=BODY, headers=bearer)).status_code == 200
        found = await admin_client.get("/metrics")
        assert 'snapkv_requests_total{outcome="success",route="/generate"} 1.0' in found.text
        assert 'snapkv_requests_total{outcome="success",route="/health/live"} 2.0' in found.text


@pytest.mark.parametrize(
    "path", ["/", "/docs", "/openapi.json", "/redoc", "/generate", "/v1/models", "/v1/completions"]
)
async def test_nothing_else_is_on_the_second_port(engine: FakeEngine, path: str) -> None:
    app = create_app(settings_for_tests(admin_port=0), engine)
    admin = httpx.ASGITransport(create_admin_app(app.state.parts))
    async with running(app), httpx.AsyncClient(transport=admin, base_url="http://admin") as client:
        for answer in (await client.get(path), await client.post(path, json=BODY)):
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    assert engine.requests == []


def test_the_second_port_may_be_open_without_keys_and_the_first_may_not() -> None:
    """Nothing on it needs a key."""
    settings = settings_for_tests(admin_port=9_000, admin_host="0.0.0.0")
    settings.require_access_control()
    with pytest.raises(SettingsError, match="SNAPKV_HOST"):
        settings.model_copy(update={"host": "0.0.0.0"}).require_access_control()


def test_the_link_of_a_service_is_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SNAPKV_ADMIN_PORT", "tcp://10.0.0.1:9000")
    with pytest.raises(SettingsError, match=r"SNAPKV_ADMIN_PORT: .*enableServiceLinks"):
        load_settings(env_file=None)


@pytest.mark.slow
def test_health_and_metrics_answer_during_a_drain(tmp_path: Path) -> None:
    """Over real sockets, with real signals; and both ports end with the process."""
    port = free_port()
    admin = f"http://127.0.0.1:{port}"
    with fake_server(tmp_path, shutdown_timeout_s=60, admin_port=port) as server:
        wait_for(lambda: httpx.get(f"{admin}/health/ready").status_code == 200)
        assert server.get("/metrics").status_code == 404
        answer = server.send(100)
        wait_for(lambda: "snapkv_sequences_running 1.0" in httpx.get(f"{admin}/metrics").text)
        server.signal(signal.SIGTERM)
        wait_for(lambda: httpx.get(f"{admin}/health/ready").status_code == 503)
        assert httpx.get(f"{admin}/health/ready").json() == {"status": "draining"}
        assert httpx.get(f"{admin}/health/live").status_code == 200
        assert "snapkv_sequences_running 1.0" in httpx.get(f"{admin}/metrics").text
        assert not answer.done()
        assert answer.result().json()["text"] == " w" * 100
        assert server.process.wait(timeout=30) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{admin}/health/live")
