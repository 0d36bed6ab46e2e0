"""`POST /generate`: one prompt, one answer, as JSON or as a stream of events."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, Final

import structlog
from fastapi import APIRouter, Request, Response

from app.api.dependencies import Parts
from app.api.errors import reply_for
from app.api.schemas.errors import ErrorBody
from app.api.schemas.generate import (
    GenerateRequest,
    GenerateResponse,
    StreamPiece,
    to_last_event,
    to_response,
)
from app.api.sse import (
    DONE_FRAME,
    EventStreamResponse,
    cancel_all,
    data_frame,
    wait_for_disconnect,
)
from app.api.strict_json import StrictJSONRoute
from app.services.generation import Generation, GenerationResult
from app.telemetry.logging import UNHANDLED_ERROR
from snapkv_core import SnapKVError, TokenEvent

#: What proxies log for a client that went away; nobody reads the answer.
CLIENT_CLOSED_REQUEST: Final = 499

_ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    400: {"model": ErrorBody, "description": "The prompt is too long for the model."},
    413: {"model": ErrorBody, "description": "The body is too large."},
    415: {"model": ErrorBody, "description": "The body is not declared as JSON."},
    422: {"model": ErrorBody, "description": "A value is not acceptable."},
    429: {"model": ErrorBody, "description": "The queue is full; see Retry-After."},
    500: {"model": ErrorBody, "description": "Generating the answer failed."},
    503: {"model": ErrorBody, "description": "The model is loading or the server stops."},
}

_log = structlog.get_logger("snapkv.http")

router = APIRouter(route_class=StrictJSONRoute, tags=["generate"])


@router.post(
    "/generate",
    summary="Continue a prompt with a compressed KV cache",
    response_model=GenerateResponse,
    responses=_ERRORS,
)
async def generate(body: GenerateRequest, request: Request, parts: Parts) -> Response:
    """Answer with JSON, or with server-sent events when `stream` is true."""
    request_id: str = request.state.request_id
    if not body.stream:
        result = await _complete_unless_left(body, request, parts)
        if result is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        content = to_response(result).model_dump_json(exclude_unset=True)
        return Response(content, media_type="application/json")

    # Submitted before the response starts, so that a refusal still has its own status.
    generation = await parts.generation.open(request_id, body.to_input())

    async def close(is_complete: bool) -> None:
        if not is_complete:
            request.state.outcome = "aborted"
        await generation.aclose()

    return EventStreamResponse(_frames(generation, request), on_closed=close)


async def _complete_unless_left(
    body: GenerateRequest, request: Request, parts: Parts
) -> GenerationResult | None:
    """Generate the whole answer; None when the client went away and it was aborted."""
    completing = asyncio.create_task(
        parts.generation.complete(request.state.request_id, body.to_input())
    )
    leaving = asyncio.create_task(wait_for_disconnect(request.receive))
    try:
        await asyncio.wait({completing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return completing.result() if completing.done() else None
    finally:
        await cancel_all(completing, leaving)


async def _frames(generation: Generation, request: Request) -> AsyncIterator[str]:
    try:
        async for event in generation.events():
            for piece in _pieces(generation, event):
                yield data_frame(piece)
        assert generation.summary is not None, "events() ends with a summary or an error"
        last = to_last_event(generation.request_id, generation.model, generation.summary)
        yield data_frame(last.model_dump_json(exclude_unset=True))
        yield DONE_FRAME
    except Exception as error:
        request.state.outcome = "error"
        if not isinstance(error, SnapKVError):
            _log.exception(UNHANDLED_ERROR)
        # The status is sent already: the client learns of the failure from this event.
        yield data_frame(json.dumps({"id": generation.request_id, **reply_for(error).body()}))


def _pieces(generation: Generation, event: TokenEvent) -> list[str]:
    """Return the JSON of what an event adds, none if it adds nothing."""
    is_end = event.finish_reason is not None and generation.num_choices > 1
    if not event.text and not is_end:
        return []
    piece = StreamPiece(id=generation.request_id, text=event.text)
    if generation.num_choices > 1:
        piece.index = event.choice_index
    if is_end:
        piece.finish_reason = event.finish_reason
    return [piece.model_dump_json(exclude_unset=True)]
