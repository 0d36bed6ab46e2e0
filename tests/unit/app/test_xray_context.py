"""AWS calls find the segment of their request, in its tasks and threads, and only while it is open.

`recorded` does what the SDK's patched botocore does around each AWS call.
"""

import contextvars
import io
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pytest
from aws_xray_sdk.core import xray_recorder

from app.telemetry.tracing.xray_context import (
    CONTEXT,
    MAX_SUBSEGMENTS,
    RequestSegment,
    instrument_botocore,
)
from tests.support.logs import captured_log

TRACE = "1-5759e988-bd862e3fe1be46a994272793"


@pytest.fixture(autouse=True)
def instrumented() -> Iterator[None]:
    """Set the recorder up, and leave no segment to the next test."""
    instrument_botocore()
    yield
    CONTEXT.clear_trace_entities()


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """Capture what is logged from information on; the recorder warns and reports errors."""
    with captured_log("info") as stream:
        yield stream


def recorded(service: str) -> AbstractContextManager[Any]:
    """Record what runs within as an AWS call."""
    context: AbstractContextManager[Any] = xray_recorder.in_subsegment(service, namespace="aws")
    return context


def opened(sent: list[dict[str, Any]]) -> RequestSegment:
    """Open the segment of this context; documents go to `sent`."""
    segment = RequestSegment(
        "service", TRACE, None, lambda entity: sent.append(json.loads(entity.serialize()))
    )
    CONTEXT.put_segment(segment)
    return segment


def close(segment: RequestSegment) -> None:
    """End a request, as its trace does."""
    segment.close()
    segment.send_when_complete()


def names_in(document: dict[str, Any]) -> list[str]:
    """Return the names of a document's subsegments."""
    return [part["name"] for part in document.get("subsegments", [])]


def test_call_is_a_part_of_its_request() -> None:
    sent: list[dict[str, Any]] = []
    segment = opened(sent)
    with recorded("dynamodb"), recorded("sts"):
        pass
    with recorded("s3"):
        pass
    close(segment)
    (document,) = sent
    assert names_in(document) == ["dynamodb", "s3"]
    assert names_in(document["subsegments"][0]) == ["sts"]
    assert document["subsegments"][0]["parent_id"] == document["id"]


def test_call_outside_any_request_leaves_no_trace_and_no_line(log: io.StringIO) -> None:
    with recorded("dynamodb") as outer, recorded("sts"):
        assert not outer.sampled
    assert CONTEXT.end_subsegment() is False
    assert log.getvalue() == ""


def test_threads_of_a_request_are_side_by_side() -> None:
    """Each has its own copy of the context, so none becomes the parent of another's call."""
    sent: list[dict[str, Any]] = []
    segment = opened(sent)
    meeting = threading.Barrier(4, timeout=10)

    def call(number: int) -> None:
        with recorded(f"s3-{number}"):
            meeting.wait()

    with ThreadPoolExecutor(4) as pool:
        copies = [contextvars.copy_context() for _ in range(4)]
        list(pool.map(lambda item: item[1].run(call, item[0]), enumerate(copies)))
    close(segment)
    assert sorted(names_in(sent[0])) == ["s3-0", "s3-1", "s3-2", "s3-3"]
    assert all(part["parent_id"] == sent[0]["id"] for part in sent[0]["subsegments"])


def test_call_that_outlasts_its_request_sends_the_segment_once() -> None:
    sent: list[dict[str, Any]] = []
    segment = opened(sent)
    with recorded("dynamodb"):
        contextvars.copy_context().run(close, segment)
        assert sent == []
        with recorded("sts"):
            pass
    (document,) = sent
    assert names_in(document) == ["dynamodb"]
    assert "in_progress" not in document or document["in_progress"] is False
    close_again = segment.send_when_complete
    close_again()
    assert len(sent) == 1


def test_call_behind_the_answer_is_left_alone(log: io.StringIO) -> None:
    """A task that a request left behind still holds its closed segment."""
    sent: list[dict[str, Any]] = []
    segment = opened(sent)
    close(segment)
    with recorded("dynamodb"), recorded("sts"):
        pass
    assert len(sent) == 1
    assert names_in(sent[0]) == []
    assert log.getvalue() == ""


def test_many_calls_are_sent_in_pieces_that_fit_a_datagram() -> None:
    sent: list[dict[str, Any]] = []
    segment = opened(sent)
    for number in range(5 * MAX_SUBSEGMENTS):
        with recorded(f"dynamodb-{number}"):
            pass
    close(segment)
    *pieces, document = sent
    names = [piece["name"] for piece in pieces] + names_in(document)
    assert sorted(names) == sorted(f"dynamodb-{n}" for n in range(5 * MAX_SUBSEGMENTS))
    assert {piece["parent_id"] for piece in pieces} == {document["id"]}
    assert {piece["trace_id"] for piece in pieces} == {TRACE}
    assert max(len(json.dumps(piece)) for piece in sent) < 30_000
