"""A real server in a process of its own, and the environment that documented examples run in."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.support.markdown import ROOT
from tests.support.tools import threads_per_worker


def example_environment(folder: Path) -> dict[str, str]:
    """Return an environment where `snapkv` and `python3` are the ones under test.

    Args:
        folder: Empty folder for the small scripts that stand in for them on PATH.

    Settings of the caller's shell are left out, the cache folder apart.
    """
    for name, command in {"snapkv": "-m app", "python3": "", "python": ""}.items():
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {command} "$@"\n', encoding="utf-8")
        script.chmod(0o755)
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("SNAPKV_") or name == "SNAPKV_CACHE_DIR"
    }
    return kept | {
        "PATH": f"{folder}{os.pathsep}{kept.get('PATH', '')}",
        "PYTHONPATH": str(ROOT),
        # PyTorch's choice is all cores, of which other workers of pytest need theirs.
        "OMP_NUM_THREADS": str(threads_per_worker()),
        "TMPDIR": str(folder),
    }


@contextmanager
def serving(environment: dict[str, str], log: Path, ready_within_s: float = 180.0) -> Iterator[str]:
    """Run `snapkv serve` with the demo model on a free port.

    Args:
        environment: What `example_environment` returns.
        log: File that takes the server's output.
        ready_within_s: How long it may take to load.

    Yields:
        Host and port, `127.0.0.1:54321`.
    """
    with started(["-m", "app", "serve"], environment, log) as (process, address):
        wait_until_ready(process, address, log, ready_within_s)
        yield address


@contextmanager
def started(
    arguments: list[str], environment: dict[str, str], log: Path
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run a server in Python on a free port, and end it if it still runs afterwards.

    Args:
        arguments: What follows the interpreter.
        environment: Its environment, apart from host and port.
        log: File that takes the server's output.

    Yields:
        The process, and host and port that it will listen on, `127.0.0.1:54321`.
    """
    address = f"127.0.0.1:{free_port()}"
    settings = {"SNAPKV_HOST": "127.0.0.1", "SNAPKV_PORT": address.rpartition(":")[2]}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=environment | settings,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process, address
    finally:
        process.terminate()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until_ready(
    process: subprocess.Popen[bytes], address: str, log: Path, within_s: float
) -> None:
    """Return when the server says that it is ready.

    Raises:
        RuntimeError: It ended or took too long; the message holds the end of its log.
    """
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"http://{address}/health/ready", timeout=5).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    state = "is not ready" if process.returncode is None else f"ended with {process.returncode}"
    tail = log.read_text(encoding="utf-8", errors="replace")[-4_000:]
    raise RuntimeError(f"the server {state}:\n{tail}")


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
