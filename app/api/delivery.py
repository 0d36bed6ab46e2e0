"""Delivers one generation, whole or as a stream, in whatever words a route has for it."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Final

import structlog
from fastapi import Request, Response
from pydantic import BaseModel

from app.api.errors import reply_for
from app.api.sse import EventStreamResponse, cancel_all, data_frame, wait_for_disconnect
from app.services.generation import (
    Generation,
    GenerationInput,
    GenerationResult,
    GenerationService,
)
from app.telemetry.logging import UNHANDLED_ERROR
from snapkv_core import DeadlineExceededError, SnapKVError

#: What a snapshot did for the request.
SNAPSHOT_HEADER: Final = "X-Snapshot"
#: A request may have to wait for another one that reads the same prompt, for longer than proxies
#: let a connection be silent: then its stream begins before it is known what becomes of it.
OPENING_TIME_S: Final = 10.0

#: What proxies log for a client that went away; nobody reads the answer.
CLIENT_CLOSED_REQUEST: Final = 499

_log = structlog.get_logger("snapkv.http")


async def deliver_whole(
    request: Request,
    service: GenerationService,
    given: GenerationInput,
    to_body: Callable[[GenerationResult], BaseModel],
) -> Response:
    """Generate the whole answer; a client that goes away meanwhile aborts it."""
    completing = asyncio.create_task(service.complete(request.state.request_id, given))
    leaving = asyncio.create_task(wait_for_disconnect(request.receive))
    try:
        await asyncio.wait({completing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        result = completing.result() if completing.done() else None
    finally:
        await cancel_all(completing, leaving)
    if result is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    content = to_body(result).model_dump_json(exclude_unset=True)
    headers = {SNAPSHOT_HEADER: result.summary.snapshot}
    return Response(content, media_type="application/json", headers=headers)


async def deliver_stream(
    request: Request,
    service: GenerationService,
    given: GenerationInput,
    to_frames: Callable[[Generation], AsyncIterator[str]],
) -> Response:
    """Answer with the frames made of a generation's events, and an error in place of their rest."""
    opening = asyncio.create_task(service.open(request.state.request_id, given))
    try:
        # Waited for before the response starts, so that a refusal still has its own status.
        await asyncio.wait({opening}, timeout=OPENING_TIME_S)
    except asyncio.CancelledError:
        await _close(opening)
        raise
    headers = {SNAPSHOT_HEADER: opening.result().snapshot} if opening.done() else {}

    async def close(is_complete: bool) -> None:
        if not is_complete:
            request.state.outcome = "aborted"
        await _close(opening)

    frames = _with_error(opening, request, to_frames)
    return EventStreamResponse(frames, on_closed=close, headers=headers)


async def _close(opening: asyncio.Task[Generation]) -> None:
    """End a generation, whether or not it has been submitted yet."""
    if not opening.done():
        await cancel_all(opening)
    if not opening.cancelled() and opening.exception() is None:
        await opening.result().aclose()


async def _with_error(
    opening: asyncio.Task[Generation],
    request: Request,
    to_frames: Callable[[Generation], AsyncIterator[str]],
) -> AsyncIterator[str]:
    request_id: str = request.state.request_id
    try:
        generation = await asyncio.shield(opening)
        request_id = generation.request_id
        async for frame in to_frames(generation):
            yield frame
    except Exception as error:
        is_late = isinstance(error, DeadlineExceededError)
        request.state.outcome = "deadline" if is_late else "error"
        if not isinstance(error, SnapKVError):
            _log.exception(UNHANDLED_ERROR)
        # The status is sent already: the client learns of the failure from this event.
        body = reply_for(request, error).body()
        yield data_frame(json.dumps({"id": request_id, **body}))
