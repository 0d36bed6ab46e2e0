"""Server-sent events: their text, and a response that ends when either side goes away."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

DONE_FRAME: Final = "data: [DONE]\n\n"
HEARTBEAT_FRAME: Final = ": keep-alive\n\n"
HEARTBEAT_INTERVAL_S: Final = 15.0
#: Beside the JSON answer of a route that streams when it is asked to, for the API description.
STREAM_RESPONSE: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "description": "The answer: JSON, or server-sent events when `stream` is true.",
        "content": {
            "text/event-stream": {
                "schema": {
                    "type": "object",
                    "description": "An event; `data` is JSON, or `[DONE]` at the end.",
                    "properties": {"data": {"type": "string"}},
                    "required": ["data"],
                }
            }
        },
    }
}


def data_frame(payload: str) -> str:
    """Return the event that carries one line of text, such as a JSON document."""
    return f"data: {payload}\n\n"


class EventStreamResponse(Response):
    """Sends events as they come, comments while none do, and always closes its source.

    Starlette's own streaming response cancels its source in a way that cancels every `await` of
    the clean-up as well; here the clean-up runs to its end.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: AsyncIterator[str],
        *,
        on_closed: Callable[[bool], Awaitable[None]],
        headers: Mapping[str, str] | None = None,
        heartbeat_interval_s: float = HEARTBEAT_INTERVAL_S,
    ) -> None:
        """Prepare the response.

        Args:
            frames: Events as text.
            on_closed: Awaited exactly once, with whether all events were sent.
            headers: More headers.
            heartbeat_interval_s: Longest silence.
        """
        super().__init__(
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no", **(headers or {})}
        )
        # Response measured its empty body; a stream has no length.
        del self.headers["content-length"]
        self._frames = frames
        self._on_closed = on_closed
        self._heartbeat_interval_s = heartbeat_interval_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        del scope  # nothing of the answer depends on it
        sending = asyncio.create_task(self._send_all(send))
        leaving = asyncio.create_task(wait_for_disconnect(receive))
        is_complete = False
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            is_complete = sending.done() and sending.exception() is None
        finally:
            # A server that runs out of patience cancels more than once.
            try:
                await cancel_all(sending, leaving)
            finally:
                await self._on_closed(is_complete)
        if sending.done() and not sending.cancelled():
            error = sending.exception()
            # A server may report a client that left by failing to send.
            if error is not None and not isinstance(error, OSError):
                raise error

    async def _send_all(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        async for frame in with_heartbeats(self._frames, self._heartbeat_interval_s):
            body = frame.encode("utf-8")
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def with_heartbeats(frames: AsyncIterator[str], interval_s: float) -> AsyncIterator[str]:
    """Yield `frames`, and a comment whenever none came for `interval_s`."""
    pending = asyncio.create_task(_next_or_none(frames))
    try:
        while True:
            done, _ = await asyncio.wait({pending}, timeout=interval_s)
            if not done:
                yield HEARTBEAT_FRAME
                continue
            frame = pending.result()
            if frame is None:
                return
            yield frame
            pending = asyncio.create_task(_next_or_none(frames))
    finally:
        await cancel_all(pending)


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has gone away; the body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancel_all(*tasks: "asyncio.Task[object] | asyncio.Task[None]") -> None:
    """Cancel tasks that still run and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _next_or_none(frames: AsyncIterator[str]) -> str | None:
    return await anext(frames, None)
