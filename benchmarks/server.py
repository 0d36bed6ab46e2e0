"""Runs the HTTP server in a process of its own, as a user would start it."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx

from benchmarks.errors import BenchmarkError

_ROOT: Final = Path(__file__).resolve().parent.parent
_LOAD_TIME_S: Final = 600.0
_STOP_TIME_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Server:
    """A server that is ready.

    Attributes:
        url: Where it listens.
        pid: Its process, when it was started here.
    """

    url: str
    pid: int | None = None


@contextmanager
def serving(
    settings: Mapping[str, str], log: Path, module: Sequence[str] = ("app", "serve")
) -> Iterator[Server]:
    """Serve on a free port of this machine.

    Args:
        settings: Environment variables by name, beside those that are set already.
        log: File that takes the server's output.
        module: The module to run, and its arguments.

    Raises:
        BenchmarkError: It does not become ready; the message holds the end of its log.
    """
    port = _free_port()
    given = {**settings, "SNAPKV_HOST": "127.0.0.1", "SNAPKV_PORT": str(port)}
    variables = [f"{name}={value}" for name, value in given.items()]
    # `env` turns into the server, so the process's id is the server's.
    command = ["env", *variables, sys.executable, "-m", *module]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=_ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_ready(process, url, log)
        yield Server(url, process.pid)
    finally:
        process.terminate()
        try:
            process.wait(timeout=_STOP_TIME_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end_s = time.monotonic() + _LOAD_TIME_S
    while time.monotonic() < end_s and process.poll() is None:
        try:
            if httpx.get(f"{url}/health/ready", timeout=5).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass  # it does not listen yet
        time.sleep(0.2)
    state = "is not ready" if process.returncode is None else f"ended with {process.returncode}"
    tail = log.read_text(encoding="utf-8", errors="replace")[-2_000:]
    raise BenchmarkError(f"the server {state}:\n{tail}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
