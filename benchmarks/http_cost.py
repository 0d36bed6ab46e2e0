"""Measures the processor time of HTTP itself: `python -m benchmarks.http_cost`.

The real server, with keys and with its log, around an engine that costs next to nothing: what is
left are reading and checking requests, and wording and sending answers.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.errors import BenchmarkError
from benchmarks.machine import machine_facts
from benchmarks.server import Server, serving
from benchmarks.telemetry_cost import Cost, cost_of

#: What the project promises at most.
MAX_TOKEN_MS: Final = 1.0
MAX_REQUEST_MS: Final = 5.0
_KEY: Final = "key-of-the-benchmark"
_NUM_CLIENTS: Final = 8
_SHORT_TOKENS: Final = 16
_LONG_TOKENS: Final = 256
_PROMPT: Final = "word " * 600
_RESULTS: Final = Path(__file__).with_name("results") / "http_cost"
_MESSAGES: Final = [{"role": "user", "content": _PROMPT}]
#: Name -> path, body.
_LOADS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "/generate, streamed": ("/generate", {"prompt": _PROMPT, "stream": True}),
    "/generate, whole": ("/generate", {"prompt": _PROMPT}),
    "/v1/chat/completions, streamed": (
        "/v1/chat/completions",
        {"model": "fake", "messages": _MESSAGES, "stream": True},
    ),
    "/v1/chat/completions, whole": (
        "/v1/chat/completions",
        {"model": "fake", "messages": _MESSAGES},
    ),
    "/v1/completions, streamed, with 5 log-probabilities": (
        "/v1/completions",
        {"model": "fake", "prompt": _PROMPT, "stream": True, "logprobs": 5},
    ),
}


@dataclass(frozen=True, slots=True)
class LoadFigure:
    """What one kind of request costs.

    Attributes:
        name: Route and manner.
        cost: Processor time of the server.
    """

    name: str
    cost: Cost

    @property
    def is_kept(self) -> bool:
        """Whether it is within what is promised."""
        return self.cost.token_ms <= MAX_TOKEN_MS and self.cost.request_ms <= MAX_REQUEST_MS


def measure(num_requests: int, rounds: int, folder: Path) -> list[LoadFigure]:
    """Load a server in turns, one kind of request after the other.

    Args:
        num_requests: Requests of a turn.
        rounds: Turns that count, after one that does not; the median does.
        folder: Takes the server's log.

    Raises:
        BenchmarkError: The server does not become ready.
    """
    settings = {"SNAPKV_API_KEYS": json.dumps([_KEY])}
    spent_ms: dict[tuple[str, int], list[float]] = {}
    with serving(
        settings, folder / "server.log", ("tests.support.fake_server", "0", "0")
    ) as server:
        for turn in range(rounds + 1):
            for name, (path, body) in _LOADS.items():
                for num_tokens in (_SHORT_TOKENS, _LONG_TOKENS):
                    limit = "max_new_tokens" if path == "/generate" else "max_tokens"
                    asked = {**body, limit: num_tokens}
                    took_ms = asyncio.run(_load(server, path, asked, num_requests))
                    if turn:
                        spent_ms.setdefault((name, num_tokens), []).append(took_ms)
    return [
        LoadFigure(
            name,
            cost_of(
                median(spent_ms[name, _SHORT_TOKENS]),
                median(spent_ms[name, _LONG_TOKENS]),
                _SHORT_TOKENS,
                _LONG_TOKENS,
            ),
        )
        for name in _LOADS
    ]


async def _load(server: Server, path: str, body: Mapping[str, Any], num_requests: int) -> float:
    """Return the server's processor time per request, milliseconds."""
    remaining = iter(range(num_requests))
    headers = {"Authorization": f"Bearer {_KEY}"}

    async def client(http: httpx.AsyncClient) -> None:
        for _ in remaining:
            async with http.stream("POST", path, json=body) as answer:
                answer.raise_for_status()
                async for _piece in answer.aiter_raw():
                    pass

    async with httpx.AsyncClient(base_url=server.url, timeout=60, headers=headers) as http:
        process = psutil.Process(server.pid)
        start_s = _processor_s(process)
        await asyncio.gather(*(client(http) for _ in range(_NUM_CLIENTS)))
        return (_processor_s(process) - start_s) / num_requests * 1e3


def _processor_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def run(arguments: Sequence[str]) -> int:
    """Measure and report.

    Returns:
        0; 1 when HTTP costs more than it may, or a figure could not be taken.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.http_cost",
        description="Measure the processor time of HTTP; fail above "
        f"{MAX_TOKEN_MS:g} ms a token or {MAX_REQUEST_MS:g} ms a request.",
    )
    parser.add_argument("--requests", type=int, default=100, help="of a turn (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="turns that count (%(default)s)")
    parser.add_argument(
        "--output", type=Path, default=_RESULTS, help="folder for the figures (%(default)s)"
    )
    options = parser.parse_args(arguments)
    if options.requests < 1 or options.rounds < 1:
        parser.error("--requests and --rounds must be at least 1")
    options.output.mkdir(parents=True, exist_ok=True)
    console = Console()
    try:
        with tempfile.TemporaryDirectory() as folder:
            figures = measure(options.requests, options.rounds, Path(folder))
    except BenchmarkError as error:
        Console(stderr=True).print(f"error: {error}", markup=False, soft_wrap=True)
        return 1
    results = {"machine": asdict(machine_facts()), "loads": [asdict(each) for each in figures]}
    path = options.output / "http_cost.json"
    path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    table = Table(title="Processor time of the server, ms")
    table.add_column("request")
    table.add_column("per request", justify="right")
    table.add_column("per token", justify="right")
    for each in figures:
        table.add_row(each.name, f"{each.cost.request_ms:.2f}", f"{each.cost.token_ms:.3f}")
    console.print(table)
    console.print(f"written to {path}")
    return 0 if all(each.is_kept for each in figures) else 1


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
