"""A real server that gets real signals: whom it still serves, whom it refuses, and how it ends."""

import json
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.served import example_environment, started, wait_until_ready

pytestmark = pytest.mark.slow

#: Between two tokens of the fake; an answer has as many as its prompt has words.
DELAY_S = 0.05
#: Far below any limit that a test sets; on a busy machine a process takes seconds just to end.
PROMPT_S = 15


class Served:
    """A running server, and requests to it from threads of their own."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        log: Path,
        client: httpx.Client,
        pool: ThreadPoolExecutor,
    ) -> None:
        self.process = process
        self.url = str(client.base_url)
        self.log = log
        self._client = client
        self._pool = pool

    def send(self, num_words: int, **fields: Any) -> "Future[httpx.Response]":
        """Ask for an answer that takes `num_words` times the delay, on a connection of its own."""
        body = {"prompt": "w " * num_words, "max_new_tokens": 1_000, **fields}
        return self._pool.submit(httpx.post, f"{self.url}/generate", json=body, timeout=30)

    def get(self, path: str) -> httpx.Response:
        """Ask on a connection that is kept alive."""
        return self._client.get(path)

    def until_running(self, num: int) -> None:
        """Return when the engine holds `num` sequences."""
        wait_for(lambda: f"snapkv_sequences_running {num}.0" in self.get("/metrics").text)

    def signal(self, number: int = signal.SIGTERM) -> float:
        """Send a signal and return the time."""
        self.process.send_signal(number)
        return time.monotonic()

    def events(self) -> list[dict[str, Any]]:
        """Return the log, without what libraries print on standard error when they are imported."""
        lines = self.log.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]


@contextmanager
def fake_server(
    folder: Path, *, load_s: float = 0.0, ready: bool = True, **settings: object
) -> Iterator[Served]:
    """Run the server around a fake engine."""
    log = folder / "server.log"
    environment = example_environment(folder) | {
        f"SNAPKV_{name.upper()}": str(value) for name, value in settings.items()
    }
    arguments = ["-m", "tests.support.fake_server", str(load_s), str(DELAY_S)]
    with (
        ThreadPoolExecutor(4) as pool,
        started(arguments, environment, log) as (process, address),
        httpx.Client(base_url=f"http://{address}", timeout=30) as client,
    ):
        if ready:
            wait_until_ready(process, address, log, 60)
        yield Served(process, log, client, pool)


def wait_for(condition: Callable[[], object], within_s: float = 10) -> None:
    """Return when `condition` gives something true."""
    give_up_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < give_up_s, "it did not happen"
        time.sleep(0.01)


def test_requests_in_flight_finish_while_new_ones_are_refused(tmp_path: Path) -> None:
    """One signal: not ready, alive, nothing new, and every answer that was begun is whole."""
    with fake_server(tmp_path, shutdown_timeout_s=60) as server:
        whole, streamed = server.send(160), server.send(160, stream=True)
        server.until_running(2)
        server.signal()
        wait_for(lambda: server.get("/health/ready").status_code == 503)
        ready = server.get("/health/ready")
        assert ready.json() == {"status": "draining"}
        assert server.get("/health/live").status_code == 200
        for body in ({"prompt": "a"}, {"prompt": "a", "stream": True}):
            refused = httpx.post(f"{server.url}/generate", json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.headers["connection"] == "close"
        # The server still runs because of the two answers, not by chance.
        assert not whole.done()
        assert whole.result().json()["text"] == " w" * 160
        assert streamed.result().text.endswith("data: [DONE]\n\n")
        assert server.process.wait(timeout=30) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health/live")
        names = [event["event"] for event in server.events()]
    assert names.count("inference_complete") == 2
    assert [e["num_requests"] for e in server.events() if e["event"] == "drain_started"] == [2]
    assert [e["num_requests"] for e in server.events() if e["event"] == "drain_finished"] == [0]


def test_requests_that_outlast_the_limit_are_told_so(tmp_path: Path) -> None:
    """After the limit a JSON answer is a 503, a stream ends with an error, the exit is clean."""
    with fake_server(tmp_path, shutdown_timeout_s=1) as server:
        whole, streamed = server.send(900), server.send(900, stream=True)
        server.until_running(2)
        signalled_s = server.signal(signal.SIGINT)
        assert whole.result().status_code == 503
        assert whole.result().json()["error"]["code"] == "engine_stopped"
        last = streamed.result().text.split("\n\n")[-2]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_stopped"
        assert server.process.wait(timeout=30) == 0
        assert 1.0 <= time.monotonic() - signalled_s < PROMPT_S


def test_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    """Whoever cannot wait signals again; what runs is ended with an error, the exit is clean."""
    with fake_server(tmp_path, shutdown_timeout_s=60) as server:
        whole, streamed = server.send(900), server.send(900, stream=True)
        server.until_running(2)
        server.signal()
        wait_for(lambda: server.get("/health/ready").status_code == 503)
        signalled_s = server.signal(signal.SIGINT)
        assert whole.result().status_code == 503
        assert "engine_stopped" in streamed.result().text
        assert server.process.wait(timeout=30) == 0
        assert time.monotonic() - signalled_s < PROMPT_S


def test_second_signal_waits_for_no_client_that_does_not_read(tmp_path: Path) -> None:
    """A stream that nobody reads cannot keep the process."""
    with fake_server(tmp_path, shutdown_timeout_s=60) as server, socket.socket() as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1_024)
        host, _, port = server.url.removeprefix("http://").partition(":")
        lazy.connect((host, int(port)))
        body = json.dumps({"prompt": "w" * 4_000_000 + " w" * 900, "stream": True}).encode()
        head = f"POST /generate HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        lazy.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        server.until_running(1)
        server.signal()
        wait_for(lambda: server.get("/health/ready").status_code == 503)
        signalled_s = server.signal()
        assert server.process.wait(timeout=30) == 0
        assert time.monotonic() - signalled_s < PROMPT_S


def test_idle_server_ends_at_once_whoever_is_connected(tmp_path: Path) -> None:
    """Connections that are kept alive, or that never sent a byte, hold nothing up."""
    with fake_server(tmp_path, shutdown_timeout_s=60) as server, socket.socket() as silent:
        host, _, port = server.url.removeprefix("http://").partition(":")
        silent.connect((host, int(port)))
        assert server.send(1).result().status_code == 200
        assert server.get("/health/live").status_code == 200
        signalled_s = server.signal(signal.SIGINT)
        assert server.process.wait(timeout=30) == 0
        assert time.monotonic() - signalled_s < PROMPT_S


def test_signal_ends_a_server_that_is_loading(tmp_path: Path) -> None:
    """There is nothing to wait for, least of all the model."""
    with fake_server(tmp_path, load_s=60, ready=False) as server:
        wait_for(lambda: is_listening(server), within_s=60)
        assert server.get("/health/ready").json() == {"status": "loading"}
        signalled_s = server.signal()
        assert server.process.wait(timeout=30) == 0
        assert time.monotonic() - signalled_s < PROMPT_S


def test_deadline_ends_a_request_while_the_server_drains(tmp_path: Path) -> None:
    """A caller's own limit holds during a drain, which it shortens."""
    with fake_server(tmp_path, shutdown_timeout_s=60, request_timeout_s=1) as server:
        whole = server.send(900)
        server.until_running(1)
        server.signal()
        assert whole.result().status_code == 504
        assert server.process.wait(timeout=30) == 0


def is_listening(server: Served) -> bool:
    """Tell whether the server answers at all."""
    try:
        return server.get("/health/live").status_code == 200
    except httpx.ConnectError:
        return False
