"""The events of one request, handed from the engine's thread to the event loop that asked."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Final

from snapkv_core.engine.finding import Finding
from snapkv_core.events import RequestSummary, RequestTimings, TokenEvent
from snapkv_core.sequence import FinishReason, Sequence

_HUNG: Final = "the request's time was up, and the engine did not end it"
#: The engine looks at deadlines between its steps. One that takes so much longer is not waited for.
_HUNG_STEP_S: Final = 10.0


class ResponseStream:
    """Events of one request, in order; an async iterator that ends after the summary.

    Belongs to the event loop that submitted the request. Close it, or use it as an async context
    manager: a stream that is closed before its end aborts its request.

    Attributes:
        request_id: The request.
        num_prompt_tokens: Tokens of its prompt.
        snapshot: What a snapshot did for it.
        lookup_ms: Milliseconds that looking its prompt up took, or waiting for another request
            that read the same.
        finding: What was known of its prompt, without the snapshot itself, which would be held
            until the answer has ended.
        loop: The event loop that it belongs to.
    """

    def __init__(
        self,
        leader: Sequence,
        finding: Finding,
        *,
        on_abandoned: Callable[["ResponseStream"], None],
        on_ended: Callable[["ResponseStream"], None],
    ) -> None:
        """Follow a request.

        Args:
            leader: Its first choice.
            finding: What was known of its prompt.
            on_abandoned: Called when the stream is closed before its end.
            on_ended: Called when its last event has come, whether or not anybody reads it.
        """
        self.request_id = leader.request_id
        self.num_prompt_tokens = leader.num_prompt_tokens
        self.snapshot = finding.use
        self.lookup_ms = finding.lookup_s * 1e3
        self.finding = replace(finding, snapshot=None)
        self._on_abandoned = on_abandoned
        self._on_ended = on_ended
        self._arrival_s = leader.arrival_s
        self._give_up_at_s = leader.deadline_s + _HUNG_STEP_S
        self.loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[TokenEvent | None] = asyncio.Queue()
        self._is_over = False

    def put(self, event: TokenEvent) -> None:
        """Append an event; on the stream's own event loop."""
        self._events.put_nowait(event)
        if event.summary is not None:
            # Its memory is free already, whether or not anybody reads the rest.
            self._on_ended(self)

    def __aiter__(self) -> "ResponseStream":
        return self

    async def __anext__(self) -> TokenEvent:
        if self._is_over:
            raise StopAsyncIteration
        try:
            async with asyncio.timeout(max(0.0, self._give_up_at_s - time.monotonic())):
                event = await self._events.get()
        except TimeoutError:
            await self.aclose()
            return self.ending(FinishReason.DEADLINE, _HUNG)
        if event is None:
            raise StopAsyncIteration
        self._is_over = event.summary is not None
        return event

    def ending(self, reason: FinishReason, error: str) -> TokenEvent:
        """Build the last event of a request that the engine did not end."""
        waited_ms = (time.monotonic() - self._arrival_s) * 1e3
        return TokenEvent(
            request_id=self.request_id,
            choice_index=0,
            text="",
            finish_reason=reason,
            summary=RequestSummary(
                request_id=self.request_id,
                num_prompt_tokens=self.num_prompt_tokens,
                num_output_tokens=0,
                finish_reasons=(reason,),
                compression=None,
                timings=RequestTimings(waited_ms, 0.0, 0.0, waited_ms, waited_ms),
                snapshot=self.snapshot,
            ),
            error=error,
        )

    async def __aenter__(self) -> "ResponseStream":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Abort the request unless it is finished; harmless when called twice."""
        if not self._is_over:
            self._is_over = True
            self._events.put_nowait(None)  # wakes a task that is waiting for the next event
            self._on_abandoned(self)
