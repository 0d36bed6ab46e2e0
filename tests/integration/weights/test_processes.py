"""Weights across processes: killed in the middle, waited for, failing under a real server."""

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from app.integrations.aws.weights.cache import WeightsCache
from app.integrations.aws.weights.folder import verify_folder
from app.integrations.aws.weights.manifest import MANIFEST_NAME, Manifest
from app.integrations.aws.weights.pull import Puller
from tests.support.logs import captured_log
from tests.support.markdown import ROOT
from tests.support.s3 import (
    LOCATION,
    PART_BYTES,
    FakeS3,
    Fault,
    S3Request,
    client_maker,
    ignore_progress,
    s3_environment,
    serving_s3,
)
from tests.support.served import example_environment, started

pytestmark = pytest.mark.slow

WEIGHTS = "model.safetensors"
NUM_PARTS = 24


@pytest.fixture
def s3() -> FakeS3:
    """Return a fake S3."""
    return FakeS3()


@pytest.fixture
def environment(
    s3: FakeS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, str]]:
    """Serve it to this process, and return the environment of others that use it."""
    with serving_s3(s3) as url:
        for name, value in s3_environment(url).items():
            monkeypatch.setenv(name, value)
        cache = {"SNAPKV_WEIGHTS_CACHE_DIR": str(tmp_path / "cache")}
        yield example_environment(tmp_path) | s3_environment(url) | cache


@pytest.fixture
def manifest(s3: FakeS3, tmp_path: Path) -> Manifest:
    """Store a model of many parts."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / WEIGHTS).write_bytes(os.urandom(NUM_PARTS * PART_BYTES))
    (folder / "config.json").write_text("{}")
    return s3.store(folder)


@contextmanager
def pulling(environment: dict[str, str], log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Run `snapkv weights pull` in a process, and kill it if it still runs afterwards."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "app", "weights", "pull", str(LOCATION)],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def pull_here(tmp_path: Path) -> Path:
    """Pull in this process, into the same cache; return the folder."""
    cache = WeightsCache(tmp_path / "cache", None)
    held = Puller(ignore_progress, create_client=client_maker()).to_cache(LOCATION, cache)
    held.release()
    return held.folder


def wait_for(condition: Callable[[], object], within_s: float = 60) -> None:
    """Return when `condition` gives something true."""
    give_up_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < give_up_s, "it did not happen"
        time.sleep(0.01)


def hold_after(num_parts: int, s3: FakeS3) -> threading.Event:
    """Let so many parts through and hold up all that follow in their middle."""
    gate, numbers = threading.Event(), itertools.count()

    def hold(request: S3Request) -> Fault | None:
        if request.start is None or not request.key.endswith(WEIGHTS):
            return None
        if next(numbers) < num_parts:
            return None
        return Fault(send_bytes=PART_BYTES // 2, hold=gate)

    s3.fault_of = hold
    return gate


def test_killed_download_goes_on_where_it_was(
    s3: FakeS3, environment: dict[str, str], manifest: Manifest, tmp_path: Path
) -> None:
    """Only what had not come is asked for by the next process."""
    gate, log = hold_after(12, s3), tmp_path / "pull.log"
    with pulling(environment, log) as process:
        # All eight connections wait in the middle of a part: twelve are whole.
        wait_for(lambda: len(s3.starts_of(WEIGHTS)) == 20)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    gate.set()
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()] == [
        f"{manifest.fingerprint}.partial"
    ]
    assert "tangerine" not in log.read_text()
    s3.requests.clear()
    s3.fault_of = lambda _: None
    folder = pull_here(tmp_path)
    assert folder == tmp_path / "cache" / manifest.fingerprint
    assert verify_folder(folder) == manifest
    assert not folder.with_name(f"{manifest.fingerprint}.partial").exists()
    assert len(s3.starts_of(WEIGHTS)) == NUM_PARTS - 12


def test_two_processes_fetch_one_model_once(
    s3: FakeS3, environment: dict[str, str], manifest: Manifest, tmp_path: Path
) -> None:
    """The second waits, and takes what the first has fetched."""
    gate, log = hold_after(4, s3), tmp_path / "pull.log"
    with pulling(environment, log) as first, ThreadPoolExecutor(1) as pool, captured_log() as own:
        wait_for(lambda: len(s3.starts_of(WEIGHTS)) == 12)
        second = pool.submit(pull_here, tmp_path)
        wait_for(lambda: "weights_lock_waited_for" in own.getvalue())
        gate.set()
        assert second.result(timeout=60) == tmp_path / "cache" / manifest.fingerprint
        assert first.wait(timeout=60) == 0, log.read_text()
    assert str(tmp_path / "cache" / manifest.fingerprint) in log.read_text().splitlines()
    assert len(s3.starts_of(WEIGHTS)) == NUM_PARTS


@contextmanager
def fake_server(
    environment: dict[str, str], log: Path
) -> Iterator[tuple["subprocess.Popen[bytes]", str]]:
    """Run the real server around a fake engine, with a model that lies in S3."""
    arguments = ["-m", "tests.support.fake_server", "0", "0"]
    settings = environment | {"SNAPKV_MODEL": str(LOCATION)}
    with started(arguments, settings, log) as (process, address):
        yield process, f"http://{address}"


def status_of(url: str) -> dict[str, object] | None:
    """Ask a server how it is; None while nobody listens."""
    try:
        answer: dict[str, object] = httpx.get(f"{url}/health/ready", timeout=5).json()
    except httpx.TransportError:
        return None
    return answer


def test_server_is_alive_while_its_weights_come(
    s3: FakeS3, environment: dict[str, str], manifest: Manifest, tmp_path: Path
) -> None:
    """Health checks and metrics are answered, then requests; the log names the fingerprint."""
    gate = hold_after(12, s3)
    log = tmp_path / "server.log"
    with fake_server(environment, log) as (_, url):
        wait_for(lambda: len(s3.starts_of(WEIGHTS)) == 20)
        assert status_of(url) == {"status": "loading"}
        assert httpx.get(f"{url}/health/live").status_code == 200
        wait_for(lambda: received(url) >= 12 * PART_BYTES)
        gate.set()
        wait_for(lambda: (status_of(url) or {}).get("status") == "ready")
        assert received(url) == manifest.total_bytes
        answer = httpx.post(f"{url}/generate", json={"prompt": "a b"}).json()
    assert answer["text"] == " a b"
    events = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    (ready,) = [event for event in events if event["event"] == "weights_ready"]
    assert ready["weights_fingerprint"] == manifest.fingerprint


def received(url: str) -> float:
    """Return the bytes that a server says have come."""
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        if line.startswith("snapkv_weights_bytes_total "):
            return float(line.split()[1])
    raise AssertionError("no such metric")


def test_server_whose_weights_cannot_be_had_ends_with_one_line(
    s3: FakeS3, environment: dict[str, str], tmp_path: Path
) -> None:
    """As for any model that cannot be loaded; health checks are answered until then."""
    may_answer, asked = threading.Event(), threading.Event()

    def refuse(request: S3Request) -> Fault:
        del request  # there is only one
        asked.set()
        may_answer.wait(60)
        return Fault(status=403, code="AccessDenied")

    s3.fault_of = refuse
    log = tmp_path / "server.log"
    with fake_server(environment, log) as (process, url):
        assert asked.wait(60)
        wait_for(lambda: status_of(url) == {"status": "loading"})
        may_answer.set()
        assert process.wait(timeout=60) == 1
    last = log.read_text().splitlines()[-1]
    assert last == f"error: {LOCATION.url_of(MANIFEST_NAME)}: access is denied (AccessDenied)"


def test_server_ends_at_once_while_its_weights_come(
    s3: FakeS3, environment: dict[str, str], manifest: Manifest, tmp_path: Path
) -> None:
    """A signal waits for no download."""
    del manifest  # only stored
    gate = hold_after(4, s3)
    with fake_server(environment, tmp_path / "server.log") as (process, url):
        wait_for(lambda: len(s3.starts_of(WEIGHTS)) == 12)
        wait_for(lambda: status_of(url) is not None)
        process.terminate()
        assert process.wait(timeout=15) == 0
    gate.set()
