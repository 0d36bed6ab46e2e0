"""`POST /generate`: one prompt, one answer, as JSON or as a stream of events."""

from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial

from fastapi import APIRouter, Request, Response

from app.api.delivery import deliver_stream, deliver_whole
from app.api.dependencies import Caller, Parts, RequestTimeout
from app.api.schemas.errors import ERROR_RESPONSES, ErrorBody
from app.api.schemas.generate import (
    GenerateRequest,
    GenerateResponse,
    StreamPiece,
    to_last_event,
    to_response,
)
from app.api.sse import DONE_FRAME, STREAM_RESPONSE, data_frame
from app.api.strict_json import StrictJSONRoute
from app.services.generation import Generation
from snapkv_core import TokenEvent

router = APIRouter(route_class=StrictJSONRoute, tags=["generate"])


@router.post(
    "/generate",
    summary="Continue a prompt with a compressed KV cache",
    response_model=GenerateResponse,
    responses=ERROR_RESPONSES
    | STREAM_RESPONSE
    | {422: {"model": ErrorBody, "description": "A value is not acceptable."}},
)
async def generate(
    body: GenerateRequest,
    request: Request,
    parts: Parts,
    caller: Caller,
    timeout_s: RequestTimeout,
) -> Response:
    """Answer with JSON, or with server-sent events when `stream` is true."""
    given = replace(body.to_input(), timeout_s=timeout_s, caller=caller)
    service = parts.generation
    if body.stream:
        return await deliver_stream(request, partial(service.open, given=given), _frames)
    return await deliver_whole(request, partial(service.complete, given=given), to_response)


async def _frames(generation: Generation) -> AsyncIterator[str]:
    async for event in generation.events():
        for piece in _pieces(generation, event):
            yield data_frame(piece)
    assert generation.summary is not None, "events() ends with a summary or an error"
    last = to_last_event(generation.request_id, generation.model, generation.summary)
    yield data_frame(last.model_dump_json(exclude_unset=True))
    yield DONE_FRAME


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
