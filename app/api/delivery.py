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
    return Response(content, media_type="application/json")


async def deliver_stream(
    request: Request,
    service: GenerationService,
    given: GenerationInput,
    to_frames: Callable[[Generation], AsyncIterator[str]],
) -> Response:
    """Answer with the frames made of a generation's events, and an error in place of their rest."""
    # Submitted before the response starts, so that a refusal still has its own status.
    generation = await service.open(request.state.request_id, given)

    async def close(is_complete: bool) -> None:
        if not is_complete:
            request.state.outcome = "aborted"
        await generation.aclose()

    frames = _with_error(generation, request, to_frames(generation))
    return EventStreamResponse(frames, on_closed=close)


async def _with_error(
    generation: Generation, request: Request, frames: AsyncIterator[str]
) -> AsyncIterator[str]:
    try:
        async for frame in frames:
            yield frame
    except Exception as error:
        is_late = isinstance(error, DeadlineExceededError)
        request.state.outcome = "deadline" if is_late else "error"
        if not isinstance(error, SnapKVError):
            _log.exception(UNHANDLED_ERROR)
        # The status is sent already: the client learns of the failure from this event.
        body = reply_for(request, error).body()
        yield data_frame(json.dumps({"id": generation.request_id, **body}))
