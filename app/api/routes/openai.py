"""OpenAI's routes, so that its clients and the field's load tools can drive this server."""

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from app.api.delivery import deliver_stream, deliver_whole
from app.api.dependencies import Caller, Parts, RequestTimeout
from app.api.errors import ModelNotFoundError, name_as_sent
from app.api.openai_forms import ChatForm, CompletionForm, OpenAIForm
from app.api.schemas.chat import ChatCompletion, ChatCompletionRequest
from app.api.schemas.common import kv_cache_of, usage_of
from app.api.schemas.errors import ENGINE_ERROR_RESPONSES, ERROR_RESPONSES, ErrorBody
from app.api.schemas.openai import (
    Completion,
    CompletionRequest,
    Model,
    ModelList,
    OpenAIRequest,
    StreamOptions,
)
from app.api.sse import DONE_FRAME, STREAM_RESPONSE, data_frame
from app.api.strict_json import StrictJSONRoute
from app.services.generation import Generation, GenerationInput, GenerationResult
from snapkv_core import RequestSummary

_OWNER: Final = "snapkv"
_NOT_FOUND: Final[dict[int | str, dict[str, Any]]] = {
    404: {"model": ErrorBody, "description": "No such model."}
}

_RESPONSES: Final = (
    ERROR_RESPONSES
    | STREAM_RESPONSE
    | _NOT_FOUND
    | {400: {"model": ErrorBody, "description": "A value is not acceptable."}}
)

router = APIRouter(prefix="/v1", route_class=StrictJSONRoute, tags=["openai"])
models_router = APIRouter(prefix="/v1", tags=["openai"])


@models_router.get("/models", summary="List the served model", responses=ENGINE_ERROR_RESPONSES)
async def list_models(parts: Parts) -> ModelList:
    """Answer with the one model there is; 503 while it loads."""
    return ModelList(object="list", data=[_served_model(parts)])


@models_router.get(
    "/models/{model:path}",
    summary="Describe a model",
    responses=ENGINE_ERROR_RESPONSES | _NOT_FOUND,
)
async def get_model(model: str, parts: Parts) -> Model:
    """Answer with the model if it is the served one."""
    served = _served_model(parts)
    if model != served.id:
        raise ModelNotFoundError(model)
    return served


@router.post(
    "/completions",
    summary="Continue a prompt, as OpenAI's API does",
    response_model=Completion,
    responses=_RESPONSES,
)
async def complete(
    body: CompletionRequest,
    request: Request,
    parts: Parts,
    caller: Caller,
    timeout_s: RequestTimeout,
) -> Response:
    """Answer with JSON, or with server-sent events when `stream` is true."""
    _require_model(body, parts)
    given = replace(body.to_input(), timeout_s=timeout_s, caller=caller)
    return await _answer(request, parts, body, given, CompletionForm())


@router.post(
    "/chat/completions",
    summary="Continue a conversation, as OpenAI's API does",
    response_model=ChatCompletion,
    responses=_RESPONSES,
)
async def chat(
    body: ChatCompletionRequest,
    request: Request,
    parts: Parts,
    caller: Caller,
    timeout_s: RequestTimeout,
) -> Response:
    """Answer with JSON, or with server-sent events when `stream` is true."""
    _require_model(body, parts)
    if body.max_completion_tokens is not None:
        name_as_sent(request, "max_new_tokens", "max_completion_tokens")
    given = replace(body.to_input(), timeout_s=timeout_s, caller=caller)
    return await _answer(request, parts, body, given, ChatForm())


def _require_model(body: OpenAIRequest, parts: Parts) -> None:
    if body.model != parts.generation.model_name:
        raise ModelNotFoundError(body.model)


def _served_model(parts: Parts) -> Model:
    host = parts.engine_host
    engine = host.engine()
    return Model(
        id=engine.model_name,
        object="model",
        created=int(host.ready_at_s),
        owned_by=_OWNER,
        max_model_len=engine.max_model_len,
    )


async def _answer(
    request: Request,
    parts: Parts,
    body: OpenAIRequest,
    given: GenerationInput,
    form: OpenAIForm,
) -> Response:
    created = int(time.time())
    if body.stream:
        options = body.stream_options or StreamOptions()
        to_frames = partial(_frames, form=form, created=created, options=options)
        return await deliver_stream(request, parts.generation, given, to_frames)

    def to_body(result: GenerationResult) -> BaseModel:
        fields = {"id": result.request_id, "created": created, "model": result.model}
        return form.whole(result.choices, {**fields, **_report_of(result.summary)})

    return await deliver_whole(request, parts.generation, given, to_body)


def _report_of(summary: RequestSummary) -> dict[str, Any]:
    """Return what is known of a request at its end."""
    return {
        "usage": usage_of(summary.num_prompt_tokens, summary.num_output_tokens),
        "kv_cache": kv_cache_of(summary.compression),
        "snapshot": summary.snapshot,
    }


async def _frames(
    generation: Generation, *, form: OpenAIForm, created: int, options: StreamOptions
) -> AsyncIterator[str]:
    fields = {"id": generation.request_id, "created": created, "model": generation.model}

    def chunk(choices: Sequence[Any], more: Mapping[str, Any]) -> str:
        body = form.chunk(choices, {**fields, **more})
        return data_frame(body.model_dump_json(exclude_unset=True))

    def usage_so_far() -> dict[str, Any]:
        if not options.include_usage:
            return {}
        if not options.continuous_usage_stats:
            # OpenAI's chunks name it from the start, as null.
            return {"usage": None}
        return {"usage": usage_of(generation.num_prompt_tokens, generation.num_output_tokens)}

    begun: set[int] = set()
    async for event in generation.events():
        if event.choice_index not in begun:
            begun.add(event.choice_index)
            if opening := form.opening(event.choice_index):
                yield chunk(opening, usage_so_far())
        if event.text or event.finish_reason is not None:
            yield chunk([form.piece(event)], usage_so_far())
    assert generation.summary is not None, "events() ends with a summary or an error"
    if options.include_usage:
        yield chunk([], _report_of(generation.summary))
    yield DONE_FRAME
