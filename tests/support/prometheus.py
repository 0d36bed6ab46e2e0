"""A real Prometheus on loopback that scrapes one server and evaluates the repository's rules."""

import json
import math
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from tests.support.observability import RULES
from tests.support.served import free_port

JOB: Final = "snapkv"
_SCRAPE_INTERVAL: Final = "500ms"
_POLL_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A running server.

    Attributes:
        client: Client of its HTTP API.
    """

    client: httpx.Client

    def get(self, path: str, **parameters: str) -> Any:
        """Call the API; return the data of its answer."""
        answer = self.client.get(f"/api/v1/{path}", params=parameters)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

    def query(self, promql: str) -> list[float]:
        """Return the values of an instant query, those apart that are no number."""
        values = [float(item["value"][1]) for item in self.get("query", query=promql)["result"]]
        return [value for value in values if not math.isnan(value)]

    def wait_for(self, promql: str, within_s: float = 30.0) -> list[float]:
        """Return the values of a query once there are any; an empty list when time is up."""
        deadline = time.monotonic() + within_s
        while not (values := self.query(promql)) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return values


@contextmanager
def scraping(program: str, target: str, folder: Path) -> Iterator[Prometheus]:
    """Run Prometheus until the block ends.

    Args:
        program: Path of the program.
        target: Host and port to scrape.
        folder: Empty folder for its data, configuration and log.
    """
    address = f"127.0.0.1:{free_port()}"
    config = {
        "global": {"scrape_interval": _SCRAPE_INTERVAL, "evaluation_interval": _SCRAPE_INTERVAL},
        "rule_files": [str(path) for path in RULES],
        "scrape_configs": [{"job_name": JOB, "static_configs": [{"targets": [target]}]}],
    }
    # JSON is YAML.
    (folder / "prometheus.yml").write_text(json.dumps(config), encoding="utf-8")
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
            ],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        with httpx.Client(base_url=f"http://{address}", timeout=10) as client:
            _wait_until_ready(client, process, folder / "prometheus.log")
            yield Prometheus(client)
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(client: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 30
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if client.get("/-/ready").status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        time.sleep(_POLL_S)
    raise RuntimeError(f"Prometheus is not ready:\n{log.read_text(encoding='utf-8')[-4_000:]}")
