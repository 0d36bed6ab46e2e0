"""Processor time of a server with all telemetry and of one without, around a fake engine."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

import httpx
import psutil

from benchmarks.server import Server, serving
from tests.support.aws import REGION, create_request_log_table, moto_server
from tests.support.xray_daemon import XRayDaemon

#: Streams at once; the promise is made for a decode step of this many.
NUM_STREAMS: Final = 8
#: Answer tokens of the two loads from which the costs per request and per token follow.
_SHORT_TOKENS: Final = 16
_LONG_TOKENS: Final = 256
_PROMPT_TOKENS: Final = 600
_CAPACITY: Final = 512
_TABLE: Final = "telemetry-cost"
_SERVER_MODULE: Final = "benchmarks.telemetry_server"
#: Longer than the request log keeps an item before it sends it.
_SETTLE_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Cost:
    """Processor time of a server, all its threads together, milliseconds.

    Attributes:
        request_ms: Of a request, whatever the length of its answer.
        token_ms: Of each token of a streamed answer.
    """

    request_ms: float
    token_ms: float


@dataclass(frozen=True, slots=True)
class TelemetryFigure:
    """What telemetry adds.

    Attributes:
        on: With X-Ray traces, log lines, EMF, Prometheus metrics and the request log.
        off: With none of them.
        step_ms: Median decode step of the real engine with `NUM_STREAMS` sequences.
        answer_tokens: Tokens of an answer, over which the cost of a request is spread.
    """

    on: Cost
    off: Cost
    step_ms: float
    answer_tokens: int

    @property
    def added_per_step_ms(self) -> float:
        """Processor time that telemetry adds to a step in which every stream gets a token."""
        per_token = self.on.token_ms - self.off.token_ms
        per_request = self.on.request_ms - self.off.request_ms
        return NUM_STREAMS * (per_token + per_request / self.answer_tokens)

    @property
    def share_of_step(self) -> float:
        """The same over the step."""
        return self.added_per_step_ms / self.step_ms


def cost_of(short_ms: float, long_ms: float, short_tokens: int, long_tokens: int) -> Cost:
    """Return the line through the costs of two requests that differ in their answers' length."""
    token_ms = (long_ms - short_ms) / (long_tokens - short_tokens)
    return Cost(request_ms=short_ms - token_ms * short_tokens, token_ms=token_ms)


def measure_costs(
    num_requests: int, rounds: int, folder: Path, say: Callable[[str], None]
) -> tuple[Cost, Cost]:
    """Load both servers in turn.

    Args:
        num_requests: Requests of a turn.
        rounds: Turns of each server with each length of answer; the median counts.
        folder: Takes the servers' logs.
        say: Told what is going on.

    Returns:
        The costs with telemetry and without.

    Raises:
        BenchmarkError: A server does not become ready.
    """
    lengths = (_SHORT_TOKENS, _LONG_TOKENS)
    with _both_servers(folder) as servers:
        per_request_ms: dict[tuple[int, int], list[float]] = {}
        for turn in range(rounds + 1):
            say(f"turn {turn} of {rounds}" + ("" if turn else ", which is not counted"))
            for side, server in enumerate(servers):
                for num_tokens in lengths:
                    spent_ms = asyncio.run(_load(server, num_requests, num_tokens))
                    if turn:  # the first one pays for what the others find ready
                        per_request_ms.setdefault((side, num_tokens), []).append(spent_ms)
    on, off = (
        cost_of(
            median(per_request_ms[side, _SHORT_TOKENS]),
            median(per_request_ms[side, _LONG_TOKENS]),
            *lengths,
        )
        for side in range(2)
    )
    return on, off


@contextmanager
def _both_servers(folder: Path) -> Iterator[Sequence[Server]]:
    """Serve with telemetry and without; daemon and table are outside of both processes."""
    with ExitStack() as stack:
        daemon = stack.enter_context(XRayDaemon())
        logging.getLogger("werkzeug").setLevel(logging.WARNING)  # moto's line for every call
        aws_url = stack.enter_context(moto_server())
        create_request_log_table(aws_url, _TABLE)
        all_on = {
            "SNAPKV_TRACING": "xray",
            "SNAPKV_TRACE_SAMPLING_RATE": "1",
            "SNAPKV_XRAY_DAEMON_ADDRESS": daemon.address,
            "SNAPKV_REQUEST_LOG_TABLE": _TABLE,
            "AWS_ENDPOINT_URL": aws_url,
            "AWS_REGION": REGION,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        all_off = {"SNAPKV_TRACING": "off", "SNAPKV_EMF": "off", "SNAPKV_LOG_LEVEL": "error"}
        yield [
            stack.enter_context(
                serving(settings, folder / f"server_{side}.log", (_SERVER_MODULE, side))
            )
            for side, settings in (("on", all_on), ("off", all_off))
        ]


async def _load(server: Server, num_requests: int, num_tokens: int) -> float:
    """Return the server's processor time per request, milliseconds."""
    body = {
        "prompt": "word " * _PROMPT_TOKENS,
        "max_new_tokens": num_tokens,
        "max_capacity_prompt": _CAPACITY,
        "stream": True,
    }
    remaining = iter(range(num_requests))

    async def client(http: httpx.AsyncClient) -> None:
        for _ in remaining:
            async with http.stream("POST", "/generate", json=body) as answer:
                answer.raise_for_status()
                async for _piece in answer.aiter_raw():
                    pass

    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        process = psutil.Process(server.pid)
        start_s = _processor_s(process)
        await asyncio.gather(*(client(http) for _ in range(NUM_STREAMS)))
        # What is sent in the background belongs to these requests too.
        await asyncio.sleep(_SETTLE_S)
        return (_processor_s(process) - start_s) / num_requests * 1e3


def _processor_s(process: psutil.Process) -> float:
    """Return the processor time that a process has had, its threads together."""
    times = process.cpu_times()
    return float(times.user + times.system)
