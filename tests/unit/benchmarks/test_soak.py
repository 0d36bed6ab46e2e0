"""The soak: what its clients refuse, what makes it fail, and that it counts what happened."""

import asyncio
import json
import os
import random
from typing import Any

import httpx
import pytest

from benchmarks.machine import forget_peak, peak_resident_bytes, resident_bytes
from benchmarks.server import Server
from benchmarks.soak import find_problems, read_gauge, soak
from benchmarks.soak_client import (
    SoakCounts,
    SoakRequest,
    answer_problems,
    draw_request,
    send,
)
from tests.unit.benchmarks.streams import DONE, answering, event

METRICS = """\
# TYPE snapkv_pages gauge
snapkv_pages{state="used"} 3.0
snapkv_pages{state="total"} 9.0
# TYPE snapkv_sequences_running gauge
snapkv_sequences_running 0.0
"""


def request(*, stream: bool = False) -> SoakRequest:
    """Return a request of 10 words for two answers of 4 tokens."""
    body = {"n": 2, "max_new_tokens": 4, "stream": stream}
    return SoakRequest("soak-1", body, num_words=10, leaves_after_s=None)


def answer(**changes: Any) -> dict[str, Any]:
    """Return a right answer to it, with changes."""
    usage = {"prompt_tokens": 11, "completion_tokens": 8, "total_tokens": 19}
    return {"id": "soak-1", "usage": usage, **changes}


async def counts_after(
    pieces: list[bytes], *, status: int = 200, stream: bool = False
) -> SoakCounts:
    """Send the request to a server of this answer."""
    counts = SoakCounts()
    async with answering(pieces, status=status) as http:
        await send(http, request(stream=stream), counts)
    return counts


def test_right_answer_has_no_problems() -> None:
    """Two answers of four tokens each."""
    assert answer_problems(request(), answer()) == []


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"id": "soak-2"}, "soak-2"),
        ({"usage": None}, "no usage"),
        ({"usage": {"prompt_tokens": 9, "completion_tokens": 8, "total_tokens": 17}}, "9 prompt"),
        ({"usage": {"prompt_tokens": 99, "completion_tokens": 8, "total_tokens": 107}}, "99 pro"),
        ({"usage": {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}}, "7 output"),
        ({"usage": {"prompt_tokens": 11, "completion_tokens": 8, "total_tokens": 18}}, "add up"),
    ],
)
def test_wrong_answer_is_named(changes: dict[str, Any], part: str) -> None:
    """One problem each, so that nothing hides behind another."""
    (problem,) = answer_problems(request(), answer(**changes))
    assert part in problem


async def test_answers_are_counted() -> None:
    """As JSON and as a stream whose last event before the end holds the counts."""
    whole = await counts_after([json.dumps(answer()).encode()])
    parts = [event({"id": "soak-1", "text": "a"}), event(answer(text="")), DONE]
    streamed = await counts_after(parts, stream=True)
    for counts in (whole, streamed):
        assert counts.outcomes == {"finished": 1}
        assert counts.statuses == {200: 1}
        assert counts.output_tokens == 8


@pytest.mark.parametrize(
    ("pieces", "status", "stream", "part"),
    [
        ([b"oops"], 500, False, "500: oops"),
        ([b"not json"], 200, False, "JSONDecodeError"),
        ([b"busy"], 429, False, "Retry-After"),
        ([event(answer(id="soak-7")), DONE], 200, True, "soak-7"),
        ([event({"id": "soak-1", "error": {"code": "x"}})], 200, True, "stream failed"),
        ([event(answer())], 200, True, "before"),
    ],
)
async def test_failures_are_kept(pieces: list[bytes], status: int, stream: bool, part: str) -> None:
    """An error other than a proper 429 or 503 fails the soak, and says which request."""
    counts = await counts_after(pieces, status=status, stream=stream)
    assert counts.outcomes == {"failed": 1}
    (problem,) = counts.problems
    assert problem.startswith("soak-1: ")
    assert part in problem


@pytest.mark.parametrize("status", [429, 503])
async def test_full_queue_is_waited_out(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as the server asks for, but no longer than some seconds."""
    waits: list[float] = []
    statuses = [status, status, 200]

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    def handle(_: httpx.Request) -> httpx.Response:
        headers = {"Retry-After": "2" if len(statuses) == 3 else "60"}
        return httpx.Response(statuses.pop(0), json=answer(), headers=headers)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    counts = SoakCounts()
    transport = httpx.MockTransport(handle)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        await send(http, request(), counts)
    assert waits == [2, 3]
    assert counts.outcomes == {"retried": 2, "finished": 1}
    assert counts.statuses == {status: 2, 200: 1}


def test_requests_are_mixed() -> None:
    """Of a thousand there are some of every kind, and a tenth leaves."""
    dice = random.Random(0)
    drawn = [draw_request(dice, str(number)) for number in range(1_000)]
    assert 60 < sum(one.leaves_after_s is not None for one in drawn) < 140
    for field, values in {
        "stream": {True, False},
        "n": {1, 2},
        "method": {"full", "snapkv"},
        "pooling": {"avg", "max"},
    }.items():
        assert {one.body[field] for one in drawn} == values
    assert all(one.body["max_capacity_prompt"] > one.body["window_size"] for one in drawn)
    assert {len(one.body["prompt"].split()) == one.num_words for one in drawn} == {True}


def test_gauge_is_found_by_name_and_labels() -> None:
    """One that is not there is not zero."""
    assert read_gauge(METRICS, "snapkv_pages", {"state": "used"}) == 3
    assert read_gauge(METRICS, "snapkv_sequences_running", {}) == 0
    assert read_gauge(METRICS, "snapkv_pages", {"state": "free"}) is None


@pytest.mark.parametrize(
    ("outcomes", "left_over", "growth", "part"),
    [
        ({"finished": 3}, {"pages": 0.0}, 0.9, None),
        ({"finished": 3}, {"pages": 0.0}, -5.0, None),
        ({}, {"pages": 0.0}, 0.0, "no request was answered"),
        ({"finished": 3}, {"pages": 2.0}, 0.0, "pages is 2"),
        ({"finished": 3}, {"pages": None}, 0.0, "no pages"),
        ({"finished": 3}, {"pages": 0.0}, 1.1, "1.10 % a minute"),
    ],
)
def test_verdict(
    outcomes: dict[str, int], left_over: dict[str, float | None], growth: float, part: str | None
) -> None:
    """Memory that shrinks is no problem; everything else is named."""
    problems = find_problems(SoakCounts(outcomes=outcomes), left_over, growth, max_growth=1.0)
    assert len(problems) == (part is not None)
    assert part is None or part in problems[0]


def test_problems_of_clients_fail_the_soak() -> None:
    """Only the first few are kept, but all are counted."""
    counts = SoakCounts(outcomes={"finished": 1})
    for number in range(100):
        counts.fail(f"problem {number}")
    problems = find_problems(counts, {}, 0.0, max_growth=1.0)
    assert problems[0] == "problem 0"
    assert len(problems) < 50
    assert counts.outcomes["failed"] == 100


async def test_whole_soak_against_a_server_that_keeps_a_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Clients are cut off at the end, and what is left over then is found."""

    async def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/metrics":
            return httpx.Response(200, text=METRICS + "snapkv_requests_waiting 0.0\n")
        await asyncio.sleep(30)
        raise AssertionError("nobody waits that long")

    real_client = httpx.AsyncClient
    transport = httpx.MockTransport(handle)
    monkeypatch.setattr(
        "benchmarks.soak.httpx.AsyncClient",
        lambda **_: real_client(transport=transport, base_url="http://test"),
    )
    monkeypatch.setattr("benchmarks.soak._SETTLE_S", 0.0)
    report = await soak(Server("http://test"), seconds=0.1, num_clients=3, max_growth=1.0)
    assert report.counts.outcomes["cut off"] == 3
    assert report.left_over['snapkv_pages{state="used"}'] == 3
    assert any('snapkv_pages{state="used"} is 3' in problem for problem in report.problems)


def test_memory_of_a_process_is_read() -> None:
    """Now and at its highest, in bytes; a peak that is forgotten begins anew."""
    pid = os.getpid()
    large = bytearray(256 << 20)
    del large
    peak_bytes = peak_resident_bytes(pid)
    assert 1 << 20 < resident_bytes(pid) <= peak_bytes
    forget_peak(pid)
    assert peak_resident_bytes(pid) < peak_bytes
    with pytest.raises(OSError, match="No such"):
        resident_bytes(2**22 + 1)
