"""OpenAI's routes, so that its clients and the field's load tools can drive this server."""

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Any, Final

from fastapi import APIRouter, Request, Response

from app.api.delivery import deliver_stream, deliver_whole
from app.api.dependencies import Parts, RequestTimeout
from app.api.errors import ModelNotFoundError
from app.api.schemas.common import kv_cache_of, usage_of
from app.api.schemas.errors import ERROR_RESPONSES, ErrorBody
from app.api.schemas.openai import (
    Completion,
    CompletionChoice,
    CompletionRequest,
    Model,
    ModelList,
    StreamOptions,
)
from app.api.sse import DONE_FRAME, data_frame
from app.api.strict_json import StrictJSONRoute
from app.services.generation import Generation, GenerationResult

_OWNER: Final = "snapkv"
_NOT_FOUND: Final[dict[int | str, dict[str, Any]]] = {
    404: {"model": ErrorBody, "description": "No such model."}
}

router = APIRouter(prefix="/v1", route_class=StrictJSONRoute, tags=["openai"])
models_router = APIRouter(prefix="/v1", tags=["openai"])


@models_router.get("/models", summary="List the served model")
async def list_models(parts: Parts) -> ModelList:
    """Answer with the one model there is; 503 while it loads."""
    return ModelList(object="list", data=[_served_model(parts)])


@models_router.get("/models/{model:path}", summary="Describe a model", responses=_NOT_FOUND)
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
    responses=ERROR_RESPONSES
    | _NOT_FOUND
    | {400: {"model": ErrorBody, "description": "A value is not acceptable."}},
)
async def complete(
    body: CompletionRequest, request: Request, parts: Parts, timeout_s: RequestTimeout
) -> Response:
    """Answer with JSON, or with server-sent events when `stream` is true."""
    if body.model != parts.generation.model_name:
        raise ModelNotFoundError(body.model)
    given = replace(body.to_input(), timeout_s=timeout_s)
    created = int(time.time())
    if body.stream:
        options = body.stream_options or StreamOptions()
        to_frames = partial(_frames, created=created, options=options)
        return await deliver_stream(request, parts.generation, given, to_frames)
    to_body = partial(_to_completion, created=created)
    return await deliver_whole(request, parts.generation, given, to_body)


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


def _to_completion(result: GenerationResult, *, created: int) -> Completion:
    summary = result.summary
    return Completion(
        id=result.request_id,
        object="text_completion",
        created=created,
        model=result.model,
        choices=[
            CompletionChoice(
                index=choice.index,
                text=choice.text,
                logprobs=None,
                finish_reason=choice.finish_reason,
            )
            for choice in result.choices
        ],
        usage=usage_of(summary.num_prompt_tokens, summary.num_output_tokens),
        kv_cache=kv_cache_of(summary.compression),
        snapshot=summary.snapshot,
    )


async def _frames(
    generation: Generation, *, created: int, options: StreamOptions
) -> AsyncIterator[str]:
    def chunk(choices: list[CompletionChoice], **more: Any) -> str:
        completion = Completion(
            id=generation.request_id,
            object="text_completion",
            created=created,
            model=generation.model,
            choices=choices,
            **more,
        )
        return data_frame(completion.model_dump_json(exclude_unset=True))

    def usage_so_far() -> dict[str, Any]:
        if not options.include_usage:
            return {}
        if not options.continuous_usage_stats:
            # OpenAI's chunks name it from the start, as null.
            return {"usage": None}
        return {"usage": usage_of(generation.num_prompt_tokens, generation.num_output_tokens)}

    async for event in generation.events():
        if event.text or event.finish_reason is not None:
            choice = CompletionChoice(
                index=event.choice_index,
                text=event.text,
                logprobs=None,
                finish_reason=event.finish_reason,
            )
            yield chunk([choice], **usage_so_far())
    summary = generation.summary
    assert summary is not None, "events() ends with a summary or an error"
    if options.include_usage:
        usage = usage_of(summary.num_prompt_tokens, summary.num_output_tokens)
        yield chunk(
            [],
            usage=usage,
            kv_cache=kv_cache_of(summary.compression),
            snapshot=summary.snapshot,
        )
    yield DONE_FRAME
