"""Delivers one generation, whole or as a stream, in whatever words a route has for it."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Final, Protocol, TypeVar

import structlog
from fastapi import Request, Response
from pydantic import BaseModel

from app.api.errors import reply_for
from app.api.sse import EventStreamResponse, cancel_all, data_frame, wait_for_disconnect
from app.services.answers import GenerationResult
from app.telemetry.logging import UNHANDLED_ERROR
from snapkv_core import DeadlineExceededError, SnapKVError, SnapshotUse

#: What a snapshot did for the request.
SNAPSHOT_HEADER: Final = "X-Snapshot"
#: A request may have to wait for another one that reads the same prompt, for longer than proxies
#: let a connection be silent: then its stream begins before it is known what becomes of it.
OPENING_TIME_S: Final = 10.0

#: What proxies log for a client that went away; nobody reads the answer.
CLIENT_CLOSED_REQUEST: Final = 499

_log = structlog.get_logger("snapkv.http")


class Opened(Protocol):
    """A request that runs; `Generation` and `PromptGroup` are such."""

    @property
    def request_id(self) -> str:
        """Its name."""

    @property
    def snapshots(self) -> tuple[SnapshotUse, ...]:
        """What a snapshot did for each of its prompts."""

    async def aclose(self) -> None:
        """Abort it if it is unfinished, and record it."""


OpenedT = TypeVar("OpenedT", bound=Opened)


async def deliver_whole(
    request: Request,
    complete: Callable[[str], Coroutine[Any, Any, GenerationResult]],
    to_body: Callable[[GenerationResult], BaseModel],
) -> Response:
    """Generate the whole answer; a client that goes away meanwhile aborts it.

    Args:
        request: The request.
        complete: Generates it, under a name.
        to_body: Puts it into words.
    """
    completing = asyncio.create_task(complete(request.state.request_id))
    leaving = asyncio.create_task(wait_for_disconnect(request.receive))
    try:
        await asyncio.wait({completing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        result = completing.result() if completing.done() else None
    finally:
        await cancel_all(completing, leaving)
    if result is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    content = to_body(result).model_dump_json(exclude_unset=True)
    headers = {SNAPSHOT_HEADER: ", ".join(summary.snapshot for summary in result.summaries)}
    return Response(content, media_type="application/json", headers=headers)


async def deliver_stream(
    request: Request,
    open_request: Callable[[str], Coroutine[Any, Any, OpenedT]],
    to_frames: Callable[[OpenedT], AsyncIterator[str]],
) -> Response:
    """Answer with the frames made of a request's events, and an error in place of their rest.

    Args:
        request: The request.
        open_request: Submits it, under a name.
        to_frames: Reads it to its end and gives the frames.
    """
    opening = asyncio.create_task(open_request(request.state.request_id))
    try:
        # Waited for before the response starts, so that a refusal still has its own status.
        await asyncio.wait({opening}, timeout=OPENING_TIME_S)
    except asyncio.CancelledError:
        await _close(opening)
        raise
    headers = {SNAPSHOT_HEADER: ", ".join(opening.result().snapshots)} if opening.done() else {}

    async def close(is_complete: bool) -> None:
        if not is_complete:
            request.state.outcome = "aborted"
        await _close(opening)

    frames = _with_error(opening, request, to_frames)
    return EventStreamResponse(frames, on_closed=close, headers=headers)


async def _close(opening: asyncio.Task[OpenedT]) -> None:
    """End a generation, whether or not it has been submitted yet."""
    if not opening.done():
        await cancel_all(opening)
    if not opening.cancelled() and opening.exception() is None:
        await opening.result().aclose()


async def _with_error(
    opening: asyncio.Task[OpenedT],
    request: Request,
    to_frames: Callable[[OpenedT], AsyncIterator[str]],
) -> AsyncIterator[str]:
    request_id: str = request.state.request_id
    try:
        opened = await asyncio.shield(opening)
        request_id = opened.request_id
        async for frame in to_frames(opened):
            yield frame
    except Exception as error:
        is_late = isinstance(error, DeadlineExceededError)
        request.state.outcome = "deadline" if is_late else "error"
        if not isinstance(error, SnapKVError):
            _log.exception(UNHANDLED_ERROR)
        # The status is sent already: the client learns of the failure from this event.
        body = reply_for(request, error).body()
        yield data_frame(json.dumps({"id": request_id, **body}))
