"""The mixed scenario: which gaps count as before and while the long prompt is read."""

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest

from benchmarks.completions import StreamRecord
from benchmarks.errors import BenchmarkError
from benchmarks.mixed_scenario import MixedPrompts, measure_mixed, mixed_figure
from tests.unit.benchmarks.streams import DONE, TARGET, piece, usage


def record(sent_s: float, *pieces_s: float) -> StreamRecord:
    """Return the record of a stream of 5 prompt tokens."""
    return StreamRecord(sent_s, list(pieces_s), 99.0, prompt_tokens=5, output_tokens=1)


def test_gaps_are_sorted_by_what_happened_meanwhile() -> None:
    """Quiet gaps begin when all streams run; reading ends with the long one's first token."""
    running = [record(0, 1, 3, 4, 9, 12), record(0, 2, 3, 4, 6, 20)]
    figure = mixed_figure("t", running, record(5, 10), record(6, 8))
    assert (figure.quiet.count, figure.reading.count) == (4, 4)
    assert (figure.quiet.max_ms, figure.reading.max_ms) == (2_000, 14_000)
    assert figure.reading.p50_ms == 4_000
    assert (figure.long_ttft_ms, figure.short_ttft_ms) == (5_000, 2_000)
    assert figure.timeline_ms[0] == (-2_000, 1_000)
    assert figure.timeline_ms[-1] == (15_000, 14_000)


def test_silent_streams_give_no_figure() -> None:
    """Streams that ended before would look as if nothing had disturbed them."""
    with pytest.raises(BenchmarkError, match="nothing to compare"):
        mixed_figure("t", [record(0, 1, 2)], record(5, 10), record(6, 8))


class Server(httpx.AsyncBaseTransport):
    """Streams for ever on a prompt `run`, until it is given up; answers others after a moment."""

    def __init__(self, running_pieces: int = 1_000_000) -> None:
        self.running_pieces = running_pieces
        self.prompts: list[str] = []
        self.num_given_up = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Answer a completion."""
        prompt = json.loads(request.content)["prompt"]
        self.prompts.append(prompt)
        return httpx.Response(200, stream=_Body(self._events(prompt)))

    async def _events(self, prompt: str) -> AsyncIterator[bytes]:
        try:
            for _ in range(self.running_pieces if prompt == "run" else 1):
                await asyncio.sleep(0.002 if prompt == "run" else 0.05)
                yield piece(" a")
        except (asyncio.CancelledError, GeneratorExit):
            self.num_given_up += 1
            raise
        yield usage(7, 1)
        yield DONE


class _Body(httpx.AsyncByteStream):
    def __init__(self, events: AsyncIterator[bytes]) -> None:
        self._events = events

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._events


PROMPTS = MixedPrompts(running=["run", "run"], long="long", short="short", delay_s=0.01)


async def test_long_and_short_arrive_beside_running_streams() -> None:
    """In this order, and the running streams are given up at the end."""
    server = Server()
    async with httpx.AsyncClient(transport=server) as client:
        figure = await measure_mixed(client, TARGET, PROMPTS)
    assert server.prompts == ["run", "run", "long", "short"]
    assert server.num_given_up == 2
    assert (figure.num_running, figure.long_prompt_tokens) == (2, 7)
    assert figure.long_ttft_ms > 40
    assert figure.reading.count > 2


@pytest.mark.parametrize("running_pieces", [3, 35])
async def test_running_streams_that_end_spoil_the_figure(running_pieces: int) -> None:
    """Before the scenario or in the middle of it."""
    async with httpx.AsyncClient(transport=Server(running_pieces)) as client:
        with pytest.raises(BenchmarkError, match="ended before"):
            await measure_mixed(client, TARGET, PROMPTS)
