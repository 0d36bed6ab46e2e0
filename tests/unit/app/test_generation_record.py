"""What is recorded of a request that did not end well."""

from collections.abc import Sequence
from datetime import UTC, datetime

import pytest

from app.services.generation import Generation
from app.services.rate_limits import Quotas
from snapkv_core import (
    CompressionConfig,
    DeadlineExceededError,
    FinishReason,
    GenerationRequest,
    RequestSummary,
    RequestTimings,
    SamplingParams,
    SnapshotUse,
    TokenEvent,
)

TIMINGS = RequestTimings(10.0, 20.0, 30.0, 30.0, 60.0)
LATE = FinishReason.DEADLINE


class Script:
    """A stream of given events."""

    num_prompt_tokens = 5
    snapshot: SnapshotUse = "off"
    lookup_ms = 0.0

    def __init__(self, events: Sequence[TokenEvent]) -> None:
        self._events = iter(events)

    def __aiter__(self) -> "Script":
        return self

    async def __anext__(self) -> TokenEvent:
        for event in self._events:
            return event
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Nothing is held."""


def summary(num_output_tokens: int) -> RequestSummary:
    """Summarise a late request."""
    return RequestSummary("r", 5, num_output_tokens, (LATE, LATE), None, TIMINGS)


async def fail(events: Sequence[TokenEvent]) -> Generation:
    """Read a generation to its failure."""
    request = GenerationRequest("r", "p", SamplingParams(n=2), CompressionConfig())
    generation = Generation(
        request,
        "m",
        Script(events),
        started_at=datetime.now(UTC),
        submitted_s=0.0,
        grant=Quotas({}).grant("anybody", request),
        is_engine_alive=lambda: True,
        on_closed=lambda _: None,
    )
    with pytest.raises(DeadlineExceededError):
        async for _ in generation.events():
            pass
    await generation.aclose()
    return generation


async def test_late_request_with_several_answers_keeps_its_times() -> None:
    """All answers end at once; the last of these events carries the summary."""
    generation = await fail(
        [
            TokenEvent("r", 0, "a", (1,)),
            TokenEvent("r", 0, "", finish_reason=LATE),
            TokenEvent("r", 1, "", finish_reason=LATE, summary=summary(1)),
        ]
    )
    record = generation.record()
    assert record.timings == TIMINGS
    assert (record.duration_ms, record.time_to_first_token_ms) == (60.0, 30.0)
    assert record.finish_reason is LATE


async def test_times_made_up_for_a_request_that_the_engine_could_not_end_are_left_out() -> None:
    """Its summary knows of no token, and one had come."""
    generation = await fail(
        [
            TokenEvent("r", 0, "a", (1,)),
            TokenEvent("r", 0, "", finish_reason=LATE, summary=summary(0)),
        ]
    )
    record = generation.record()
    assert record.timings is None
    assert record.num_output_tokens == 1
    assert record.time_to_first_token_ms is not None


async def test_request_without_a_token_has_no_time_to_its_first() -> None:
    generation = await fail([TokenEvent("r", 0, "", finish_reason=LATE, summary=summary(0))])
    assert generation.record().time_to_first_token_ms is None
    assert generation.record().timings == TIMINGS
