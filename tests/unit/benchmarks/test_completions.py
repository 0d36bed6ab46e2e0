"""The streaming client: what it sends, when a piece counts, and what is a failure."""

from collections.abc import AsyncIterator, Iterable
from typing import Any

import httpx
import pytest

from benchmarks.completions import (
    StreamRecord,
    Target,
    find_target,
    sse_data,
    stream_completion,
)
from benchmarks.errors import BenchmarkError
from benchmarks.http_load import measure_load, summarise
from tests.unit.benchmarks.streams import DONE, TARGET, answering, event, piece, usage


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        """Return the time, in seconds."""
        return self.now_s

    def tick(self) -> None:
        """Move on by a second."""
        self.now_s += 1


async def record_of(pieces: Iterable[bytes], status: int = 200) -> StreamRecord:
    """Receive a stream whose pieces come a second apart."""
    record, clock = StreamRecord(), Clock()
    async with answering(pieces, status=status, before=clock.tick) as client:
        await stream_completion(client, TARGET, "hello", max_tokens=3, record=record, clock=clock)
    return record


async def test_pieces_are_timed_when_they_arrive() -> None:
    """Comments, empty texts and usage are no pieces; two events may come in one packet."""
    record = await record_of(
        [b": keep-alive\n\n", piece(""), piece(" a"), piece(" b") + piece(" c"), usage(5, 3), DONE]
    )
    assert record.sent_s == 100
    assert record.pieces_s == [103, 104, 104]
    assert record.ttft_s == 3
    assert (record.prompt_tokens, record.output_tokens, record.ended_s) == (5, 3, 106)


async def test_event_may_be_cut_anywhere() -> None:
    """A piece counts when its event is whole."""
    whole = piece(" a")
    record = await record_of([whole[:9], whole[9:], DONE])
    assert record.pieces_s == [102]


@pytest.mark.parametrize(
    ("pieces", "status", "part"),
    [
        ([b'{"error": "busy"}'], 429, "429: .*busy"),
        ([piece(" a"), event({"error": {"message": "out of memory"}})], 200, "out of memory"),
        ([piece(" a")], 200, "ended before"),
        ([event("{")], 200, "JSONDecodeError"),
    ],
)
async def test_failures_are_told_apart_from_answers(
    pieces: list[bytes], status: int, part: str
) -> None:
    """No figure is made of a stream that was refused, failed or cut off."""
    with pytest.raises(BenchmarkError, match=part):
        await record_of(pieces, status)


async def test_stream_without_text_has_no_first_token() -> None:
    """Instead of a time of zero."""
    with pytest.raises(BenchmarkError, match="no text"):
        assert (await record_of([usage(1, 0), DONE])).ttft_s


@pytest.mark.parametrize("takes_knobs", [True, False])
async def test_compression_fields_are_sent_to_our_server_only(takes_knobs: bool) -> None:
    """Another server might refuse them; everything else is the same for both."""
    sent: list[dict[str, Any]] = []
    target = Target("t", "http://test", "m", takes_knobs)
    async with answering([piece(" a"), DONE], sent=sent) as client:
        await stream_completion(client, target, "hi", max_tokens=7, record=StreamRecord())
    (body,) = sent
    assert ("max_capacity_prompt" in body) is takes_knobs
    assert body["prompt"] == "hi"
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("m", 7, 0)
    assert body["stream_options"] == {"include_usage": True}
    assert body["ignore_eos"] is True


async def test_sse_joins_lines_and_skips_other_fields() -> None:
    """As the format's standard says."""

    async def lines() -> AsyncIterator[str]:
        for line in ("event: x", "data: a", "data:b", "", ":c", "", "data:  d"):
            yield line

    assert [data async for data in sse_data(lines())] == ["a\nb", " d"]


async def test_model_is_asked_for_and_its_lack_is_an_error() -> None:
    """A server that names no model cannot be measured."""
    async with answering([b'{"data": [{"id": "tiny"}, {"id": "other"}]}']) as client:
        target = await find_target(client, "t", "http://test", knobs=False)
    assert target == Target("t", "http://test", "tiny", takes_knobs=False)
    for answer in (b"<html>", b'{"data": []}', b"[]"):
        async with answering([answer]) as client:
            with pytest.raises(BenchmarkError, match="http://test/v1/models"):
                await find_target(client, "t", "http://test", knobs=False)


async def test_load_sends_every_prompt() -> None:
    """One stream each, and the figure says what the server counted."""
    sent: list[dict[str, Any]] = []
    async with answering([piece(" a"), piece(" b"), usage(9, 2), DONE], sent=sent) as client:
        figure = await measure_load(
            client, TARGET, ["one", "two"], aimed_prompt_tokens=8, max_tokens=2
        )
    assert sorted(body["prompt"] for body in sent) == ["one", "two"]
    assert (figure.num_streams, figure.prompt_tokens, figure.output_tokens) == (2, 9, 4)


def test_throughput_is_over_the_whole_load() -> None:
    """From the first request to the last end, and gaps of all streams together."""
    records = [
        StreamRecord(10.0, [11.0, 12.0], 12.0, prompt_tokens=4, output_tokens=2),
        StreamRecord(10.0, [13.0, 17.0, 20.0], 20.0, prompt_tokens=6, output_tokens=3),
    ]
    figure = summarise("t", records, aimed_prompt_tokens=5)
    assert figure.output_tokens_per_s == 0.5
    assert figure.prompt_tokens == 5
    assert (figure.ttft.p50_ms, figure.ttft.max_ms) == (2_000, 3_000)
    assert (figure.inter_token.count, figure.inter_token.p50_ms) == (3, 3_000)


def test_streams_of_one_piece_have_no_gaps() -> None:
    """Instead of a latency of zero."""
    with pytest.raises(BenchmarkError, match="two pieces"):
        summarise("t", [StreamRecord(1.0, [2.0], 2.0)], aimed_prompt_tokens=5)


async def test_unreachable_server_is_one_line() -> None:
    """What httpx raises does not reach the user as a traceback."""

    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    async with httpx.AsyncClient(transport=httpx.MockTransport(refuse)) as client:
        with pytest.raises(BenchmarkError, match="this server: ConnectError"):
            await stream_completion(client, TARGET, "a", max_tokens=1, record=StreamRecord())
