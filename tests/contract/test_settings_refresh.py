"""A secret that changes while the service runs: what is taken over, what waits for a restart."""

import asyncio
import io
import json
import logging
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from app.integrations.aws.secrets import SecretReader
from app.main import create_app
from app.services import settings_refresh
from app.services.settings_refresh import SettingsRefresh
from app.settings import Settings, load_settings
from app.telemetry.aws_metrics import SECRET_OUTCOMES
from tests.support.app_client import running, settings_for_tests, until
from tests.support.aws import ScriptedAws, error, moto_server, plain_client, use_aws
from tests.support.fake_engine import FakeEngine
from tests.support.logs import captured_log, events_named

KEY = "sk-live-0123456789abcdef"
OTHER = "sk-live-fedcba9876543210"
EVERY_S = 0.03


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    """Run moto's server."""
    with moto_server() as url:
        yield url


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """Capture the log, down to what libraries say when they are asked to say everything."""
    with captured_log("debug") as stream:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        yield stream


class Secret:
    """A secret of one test."""

    def __init__(self, url: str, name: str) -> None:
        self.name = name
        self._client = plain_client("secretsmanager", url)
        self._client.create_secret(Name=name, SecretString="{}")

    def put(self, document: object) -> None:
        """Give it a value."""
        text = document if isinstance(document, str) else json.dumps(document)
        self._client.put_secret_value(SecretId=self.name, SecretString=text)


@pytest.fixture
def secret(moto: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Secret:
    """Create an empty secret and point the settings to it."""
    use_aws(monkeypatch, moto)
    secret = Secret(moto, f"{request.node.originalname}-{uuid.uuid4().hex}")
    monkeypatch.setenv("SNAPKV_SECRET_ID", secret.name)
    return secret


def loader() -> Callable[[], Settings]:
    """Return what reads the settings as `snapkv serve` does, to be repeated without delay."""
    reader = SecretReader()

    def load() -> Settings:
        settings = load_settings(env_file=None, read_secret=reader.read)
        return settings.model_copy(update={"secret_refresh_s": EVERY_S})

    return load


@asynccontextmanager
async def refreshed_service(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    """Serve with settings that are read again and again."""
    load = loader()
    app = create_app(await asyncio.to_thread(load), engine, reload_settings=load)
    async with running(app) as client:
        yield client


async def default_knobs(client: httpx.AsyncClient, engine: FakeEngine) -> tuple[int, int, int]:
    """Return the knobs of a request that names none."""
    await client.post("/generate", json={"prompt": "a"})
    knobs = engine.requests[-1].compression
    return knobs.max_capacity_prompt, knobs.window_size, knobs.kernel_size


async def outcomes(client: httpx.AsyncClient) -> dict[str, float]:
    """Return how often each outcome was counted."""
    text = (await client.get("/metrics")).text
    lines = [
        line for line in text.splitlines() if line.startswith("snapkv_settings_refreshes_total")
    ]
    return {line.split('"')[1]: float(line.split()[-1]) for line in lines}


async def until_applied(client: httpx.AsyncClient) -> None:
    """Return when a change was taken over, which is counted once and may have been by now."""
    async with asyncio.timeout(20):
        while (await outcomes(client))["applied"] < 1:  # noqa: ASYNC110  # over HTTP
            await asyncio.sleep(0.005)


async def until_counted(client: httpx.AsyncClient, outcome: str, times: int = 1) -> None:
    """Return when an outcome that comes again and again was counted so many times more."""
    async with asyncio.timeout(20):
        goal = (await outcomes(client))[outcome] + times
        while (await outcomes(client))[outcome] < goal:  # noqa: ASYNC110  # over HTTP
            await asyncio.sleep(0.005)


async def test_new_defaults_hold_from_the_next_request(secret: Secret, log: io.StringIO) -> None:
    """Without a restart, together, and explicit knobs still win."""
    engine = FakeEngine()
    secret.put({"max_capacity_prompt": 100, "window_size": 8})
    async with refreshed_service(engine) as client:
        assert await default_knobs(client, engine) == (100, 8, 15)
        secret.put({"max_capacity_prompt": "200", "kernel_size": 5})
        await until_applied(client)
        async with asyncio.timeout(5):
            while await default_knobs(client, engine) != (200, 16, 5):  # noqa: ASYNC110  # over HTTP
                await asyncio.sleep(0.005)
        await client.post("/generate", json={"prompt": "a", "max_capacity_prompt": 50})
        assert engine.requests[-1].compression.max_capacity_prompt == 50
        assert (await outcomes(client))["applied"] == 1
    (line,) = events_named(log, "settings_refreshed")
    assert line["fields"] == ["kernel_size", "max_capacity_prompt", "window_size"]


async def test_nearer_settings_keep_their_place(
    secret: Secret, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable wins over the secret also later."""
    monkeypatch.setenv("SNAPKV_KERNEL_SIZE", "9")
    engine = FakeEngine()
    async with refreshed_service(engine) as client:
        secret.put({"kernel_size": 5})
        await until_counted(client, "unchanged", 5)
        assert await default_knobs(client, engine) == (512, 16, 9)
        assert (await outcomes(client))["applied"] == 0


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (f'{{"api_keys": ["{KEY}"', "it does not hold JSON"),
        ({"kernel_size": 4}, "kernel_size: must be odd so that pooling is centred"),
        ({"window_size": 600}, "window_size"),
        ({"kernel_size": 5, "window_size": KEY}, "window_size: must be an integer"),
    ],
    ids=["no-json", "range", "combination", "type"],
)
async def test_bad_secret_changes_nothing(
    secret: Secret, log: io.StringIO, bad: object, reason: str
) -> None:
    """The values in force stay, all of them, until the secret is right again."""
    engine = FakeEngine()
    secret.put({"kernel_size": 7})
    async with refreshed_service(engine) as client:
        secret.put(bad)
        await until_counted(client, "failed")
        assert await default_knobs(client, engine) == (512, 16, 7)
        secret.put({"kernel_size": 9})
        await until_applied(client)
        await until(lambda: events_named(log, "settings_refreshed"))
        assert await default_knobs(client, engine) == (512, 16, 9)
    line = events_named(log, "settings_refresh_failed")[0]
    assert line["reason"].startswith(f"secret {secret.name}: ")
    assert reason in line["reason"]
    assert KEY not in log.getvalue()


async def test_model_needs_a_restart(secret: Secret, log: io.StringIO) -> None:
    """Said once, while the knobs beside it are taken over for the model that runs."""
    engine = FakeEngine()
    async with refreshed_service(engine) as client:
        secret.put({"model_name": "owner/name"})
        await until_counted(client, "restart_needed", 3)
        assert await default_knobs(client, engine) == (512, 16, 15)
        secret.put({"model_name": "owner/name", "kernel_size": 7})
        await until_applied(client)
        await until_counted(client, "restart_needed", 3)
        assert await default_knobs(client, engine) == (512, 16, 7)
    assert [line["fields"] for line in events_named(log, "settings_restart_needed")] == [["model"]]


@pytest.mark.parametrize(
    "trouble", [None, error("AccessDeniedException"), lambda _body: (200, b"<html>")]
)
async def test_secrets_manager_that_breaks_changes_nothing(
    secret: Secret, monkeypatch: pytest.MonkeyPatch, trouble: Any
) -> None:
    """Refused, denied or garbled: the service answers as before."""
    engine = FakeEngine()
    secret.put({"kernel_size": 7})
    load = loader()
    settings = load()
    with ScriptedAws(trouble or (lambda _body: (200, {}))) as aws:
        use_aws(monkeypatch, "http://127.0.0.1:9" if trouble is None else aws.url)
        app = create_app(settings, engine, reload_settings=loader())
        async with running(app) as client:
            await until_counted(client, "failed")
            assert await default_knobs(client, engine) == (512, 16, 7)


@pytest.mark.usefixtures("secret")
async def test_secrets_manager_that_hangs_holds_up_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither requests nor the end of the service."""
    engine = FakeEngine()
    settings = loader()()
    with ScriptedAws(lambda _body: (200, {})) as aws:
        aws.answer = aws.hang
        use_aws(monkeypatch, aws.url)
        app = create_app(settings, engine, reload_settings=loader())
        async with asyncio.timeout(4), running(app) as client:
            await until(lambda: aws.requests)
            for _ in range(20):
                assert (await client.post("/generate", json={"prompt": "a"})).status_code == 200


async def test_crash_while_reading_is_a_failure_like_others(log: io.StringIO) -> None:
    """The thread goes on; the message of an exception nobody foresaw is not logged."""
    calls: list[int] = []

    def load() -> Settings:
        calls.append(1)
        raise RuntimeError(KEY)

    settings = settings_for_tests(secret_id="any").model_copy(update={"secret_refresh_s": EVERY_S})
    refresh = SettingsRefresh(
        settings, load, on_change=lambda _settings: None, count_outcome=lambda _outcome: None
    )
    refresh.start()
    await until(lambda: len(calls) >= 2)
    refresh.stop()
    assert events_named(log, "settings_refresh_crashed")[0]["error_type"] == "RuntimeError"
    assert KEY not in log.getvalue()


@pytest.mark.parametrize(
    "settings",
    [settings_for_tests(secret_id="any", secret_refresh_s=0), settings_for_tests()],
    ids=["zero", "no-secret"],
)
async def test_nothing_is_read_without_interval_or_secret(settings: Settings) -> None:
    """Both switch it off, as does a caller that gives no way to read."""
    for load in (None, lambda: settings):
        refresh = SettingsRefresh(
            settings, load, on_change=lambda _settings: None, count_outcome=lambda _outcome: None
        )
        before = set(threading.enumerate())
        refresh.start()
        assert set(threading.enumerate()) <= before


async def test_keys_change_but_are_never_taken_away(secret: Secret, log: io.StringIO) -> None:
    """New keys hold at once; no keys at all would open the service and waits for a restart."""
    secret.put({"api_keys": {"team-a": KEY}})
    load = loader()
    settings = await asyncio.to_thread(load)
    found: list[Settings] = []
    counted: list[str] = []
    refresh = SettingsRefresh(settings, load, on_change=found.append, count_outcome=counted.append)
    refresh.start()
    secret.put({"api_keys": {"team-a": KEY, "team-b": OTHER}})
    await until(lambda: found)
    assert list(found[-1].api_keys) == ["team-a", "team-b"]
    secret.put({})
    await until(lambda: "restart_needed" in counted)
    secret.put({"kernel_size": 5})
    await until(lambda: len(found) == 2)
    refresh.stop()
    assert list(found[-1].api_keys) == ["team-a", "team-b"]
    assert found[-1].kernel_size == 5
    for hidden in (KEY, OTHER):
        assert hidden not in log.getvalue()


async def test_limits_hold_from_the_next_request(secret: Secret) -> None:
    """Together with the keys that they are for; limits for nobody change nothing."""
    secret.put({"api_keys": {"team-a": KEY}})
    engine, body = FakeEngine(), {"prompt": "a", "max_new_tokens": 1}
    async with refreshed_service(engine) as client:
        keys = [{"Authorization": f"Bearer {key}"} for key in (KEY, OTHER)]
        assert (await client.post("/generate", json=body, headers=keys[0])).status_code == 200
        keys_and_limits = {
            "api_keys": {"team-a": KEY, "team-b": OTHER},
            "key_limits": {"default": {"requests_per_minute": 1}, "team-b": {}},
        }
        secret.put(keys_and_limits)
        await until_applied(client)
        async with asyncio.timeout(20):
            while (await client.get("/v1/models", headers=keys[1])).status_code == 401:  # noqa: ASYNC110  # over HTTP
                await asyncio.sleep(0.005)
        statuses = [
            (await client.post("/generate", json=body, headers=key)).status_code
            for key in (*keys, *keys)
        ]
        # The request that was sent before there were limits counts.
        assert statuses == [429, 200, 429, 429]
        secret.put({**keys_and_limits, "key_limits": {"team-c": {}}})
        await until_counted(client, "failed")
        assert (await client.post("/generate", json=body, headers=keys[0])).status_code == 429


def test_outcomes_are_those_that_the_metric_knows() -> None:
    """Each has a counter from the start."""
    names = ("UNCHANGED", "APPLIED", "RESTART_NEEDED", "FAILED")
    assert tuple(getattr(settings_refresh, name) for name in names) == SECRET_OUTCOMES
