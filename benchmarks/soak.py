"""Loads the real HTTP server for a while and judges errors, leaks and memory.

`python -m benchmarks.soak [--seconds N] [--clients N] [--url URL --pid PID]` exits with 1 when an
answer was wrong, something was left over, or resident memory went on growing.
"""

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from benchmarks.errors import BenchmarkError
from benchmarks.figures import change_between_quarters_percent, slope_percent_per_minute
from benchmarks.machine import MachineFacts, machine_facts, resident_bytes
from benchmarks.plots import plot_memory
from benchmarks.server import Server, serving
from benchmarks.soak_client import SoakCounts, run_client

_RESULTS: Final = Path(__file__).with_name("results") / "soak"
_TIMEOUT: Final = httpx.Timeout(30.0, read=300.0)
_SAMPLE_EVERY_S: Final = 0.5
#: An abandoned request is aborted at the engine's next turn, a slice of prompt later at most.
_SETTLE_S: Final = 20.0
#: Gauges that must be at zero when nobody asks for anything any more.
_MUST_BE_ZERO: Final[tuple[tuple[str, dict[str, str]], ...]] = (
    ("snapkv_pages", {"state": "used"}),
    ("snapkv_sequences_running", {}),
    ("snapkv_requests_waiting", {}),
)


@dataclass(frozen=True, slots=True)
class SoakReport:
    """What came out of a soak.

    Attributes:
        machine: What it ran on.
        seconds: How long the load lasted.
        num_clients: Clients at work at once.
        counts: What they saw.
        rss_samples: Seconds since the load began, and resident bytes of the server; empty when its
            process is not known.
        rss_growth_percent_per_minute: Least-squares slope over the second half, the first being
            warm-up.
        rss_change_percent: Mean of the last quarter of the samples over that of the first.
        left_over: Gauges that should be zero, at the end.
        problems: Why it failed; empty when it passed.
    """

    machine: MachineFacts
    seconds: float
    num_clients: int
    counts: SoakCounts
    rss_samples: list[tuple[float, float]]
    rss_growth_percent_per_minute: float
    rss_change_percent: float
    left_over: dict[str, float | None]
    problems: list[str]


async def soak(server: Server, seconds: float, num_clients: int, max_growth: float) -> SoakReport:
    """Load a server and judge the result.

    Args:
        server: A server that is ready.
        seconds: How long to load it.
        num_clients: Clients at work at once.
        max_growth: Most growth of resident memory after warm-up, % per minute.
    """
    machine = machine_facts()
    counts = SoakCounts()
    samples: list[tuple[float, float]] = []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=_TIMEOUT, limits=limits) as http:
        clients = [
            asyncio.create_task(run_client(http, f"soak-{index}", index, counts))
            for index in range(num_clients)
        ]
        await _watch(server.pid, seconds, samples)
        # All at once, wherever their requests are: the server must let go of every one.
        for client in clients:
            client.cancel()
        ends = await asyncio.gather(*clients, return_exceptions=True)
        left_over = await _left_over(http)
    for end in ends:
        if not isinstance(end, asyncio.CancelledError):
            counts.fail(f"a client broke: {end!r}")
    growth = slope_percent_per_minute(samples[len(samples) // 2 :])
    return SoakReport(
        machine=machine,
        seconds=seconds,
        num_clients=num_clients,
        counts=counts,
        rss_samples=samples,
        rss_growth_percent_per_minute=growth,
        rss_change_percent=change_between_quarters_percent(samples),
        left_over=left_over,
        problems=find_problems(counts, left_over, growth, max_growth),
    )


def find_problems(
    counts: SoakCounts, left_over: dict[str, float | None], growth: float, max_growth: float
) -> list[str]:
    """Return why a soak has failed, a line each.

    Args:
        counts: What the clients saw.
        left_over: Gauges that should be zero; None stands for one that is not reported.
        growth: Growth of resident memory after warm-up, % per minute.
        max_growth: The most that is accepted.
    """
    problems = list(counts.problems)
    if "finished" not in counts.outcomes:
        problems.append("no request was answered")
    for name, value in left_over.items():
        if value is None:
            problems.append(f"the server reports no {name}")
        elif value != 0:
            problems.append(f"{name} is {value:g} after the load")
    if growth > max_growth:
        problems.append(
            f"resident memory grows by {growth:.2f} % a minute, at most {max_growth:g} is accepted"
        )
    return problems


def read_gauge(metrics: str, name: str, labels: dict[str, str]) -> float | None:
    """Return a gauge from metrics in Prometheus' text format, or None when it is not there."""
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name == name and sample.labels == labels:
                return float(sample.value)
    return None


async def _watch(pid: int | None, seconds: float, samples: list[tuple[float, float]]) -> None:
    """Let the load run for its time, and sample the server's memory meanwhile."""
    start_s = time.monotonic()
    while (elapsed_s := time.monotonic() - start_s) < seconds:
        if pid is not None:
            try:
                samples.append((elapsed_s, float(resident_bytes(pid))))
            except OSError as error:
                raise BenchmarkError(f"the server ended after {elapsed_s:.0f} s") from error
        await asyncio.sleep(_SAMPLE_EVERY_S)


async def _left_over(http: httpx.AsyncClient) -> dict[str, float | None]:
    """Read the gauges until all are zero or they have had time enough."""
    end_s = time.monotonic() + _SETTLE_S
    while True:
        try:
            text = (await http.get("/metrics")).text
        except httpx.HTTPError as error:
            raise BenchmarkError(f"the server gives no metrics: {error!r}") from error
        found = {
            name + "".join(f'{{{key}="{value}"}}' for key, value in labels.items()): read_gauge(
                text, name, labels
            )
            for name, labels in _MUST_BE_ZERO
        }
        if not any(found.values()) or time.monotonic() > end_s:
            return found
        await asyncio.sleep(0.5)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the arguments; wrong ones end the process with status 2 and say what is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak",
        description="Load the HTTP server for a while; fail on wrong answers and on leaks.",
    )
    parser.add_argument("--seconds", type=float, default=300.0, help="%(default)s")
    parser.add_argument("--clients", type=int, default=64, help="%(default)s")
    parser.add_argument("--model", default="demo", help="%(default)s")
    parser.add_argument("--url", help="a running server, instead of starting one")
    parser.add_argument("--pid", type=int, help="its process, to watch its memory")
    parser.add_argument(
        "--max-growth",
        type=float,
        default=1.0,
        help="most growth of resident memory after warm-up, %% per minute (%(default)s)",
    )
    parser.add_argument(
        "--output", type=Path, default=_RESULTS, help="folder for figures and plot (%(default)s)"
    )
    options = parser.parse_args(arguments)
    if options.seconds <= 0 or options.clients < 1:
        parser.error("--seconds must be above 0 and --clients at least 1")
    if options.pid is not None and options.url is None:
        parser.error("--pid goes with --url: the process of a server started here is known")
    if options.url is not None and not options.url.startswith(("http://", "https://")):
        parser.error(f"--url: {options.url!r} is no URL such as http://127.0.0.1:8000")
    return options


def run(arguments: Sequence[str]) -> int:
    """Soak and report.

    Returns:
        0, or 1 when something failed.
    """
    options = parse(arguments)
    console = Console()
    options.output.mkdir(parents=True, exist_ok=True)
    try:
        with _server(options) as server:
            report = asyncio.run(soak(server, options.seconds, options.clients, options.max_growth))
    except BenchmarkError as error:
        Console(stderr=True).print(f"error: {error}", markup=False, soft_wrap=True)
        return 1
    path = options.output / "soak.json"
    path.write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
    _print(report, console)
    if report.rss_samples:
        plot_memory(report.rss_samples, options.output / "soak_rss.png")
    console.print(f"written to {options.output}")
    return 1 if report.problems else 0


def _server(options: argparse.Namespace) -> AbstractContextManager[Server]:
    if options.url is not None:
        return contextlib.nullcontext(Server(options.url, options.pid))
    settings = {
        "SNAPKV_MODEL": options.model,
        # Room for most clients, so that the queue is long and a few are told to come back.
        "SNAPKV_MAX_NUM_WAITING": str(max(1, options.clients - 16)),
        "SNAPKV_LOG_LEVEL": "warning",
    }
    return serving(settings, options.output / "server.log")


def _print(report: SoakReport, console: Console) -> None:
    counts = report.counts
    console.print(f"{report.seconds:g} s, {report.num_clients} clients")
    console.print(f"requests: {counts.outcomes}, {counts.output_tokens:,} output tokens")
    console.print(f"statuses: {dict(sorted(counts.statuses.items()))}")
    if report.rss_samples:
        console.print(
            f"RSS: {report.rss_growth_percent_per_minute:+.2f} % a minute in the second half, "
            f"{report.rss_change_percent:+.2f} % from first to last quarter"
        )
    else:
        console.print("RSS: not watched, the server's process is not known (--pid)")
    console.print(f"left over: {report.left_over}", markup=False, soft_wrap=True)
    for problem in report.problems:
        console.print(f"FAILED: {problem}", markup=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
