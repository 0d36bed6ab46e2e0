"""OpenAI's routes, so that its clients and the field's load tools can drive this server."""

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
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
from app.api.schemas.common import explanation_of, kv_cache_of, usage_of
from app.api.schemas.errors import ENGINE_ERROR_RESPONSES, ERROR_RESPONSES, ErrorBody
from app.api.schemas.openai import (
    Completion,
    CompletionRequest,
    Model,
    ModelList,
    OpenAIRequest,
    PromptReport,
    StreamOptions,
)
from app.api.sse import DONE_FRAME, STREAM_RESPONSE, data_frame
from app.api.strict_json import StrictJSONRoute
from app.services.answers import GenerationResult
from app.services.inputs import GenerationInput
from app.services.prompt_group import PromptGroup, complete_group, open_group
from app.services.tool_calls import MarkerReader, TagsReader, ToolCallReader, WholeReader
from snapkv_core import InvalidParameterError, RequestSummary

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
    inputs = [replace(one, timeout_s=timeout_s, caller=caller) for one in _inputs(body, parts)]
    form = CompletionForm(with_logprobs=body.num_logprobs is not None)
    return await _answer(request, parts, body, inputs, form)


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
    name_as_sent(request, "logprobs", "top_logprobs")
    if body.max_completion_tokens is not None:
        name_as_sent(request, "max_new_tokens", "max_completion_tokens")
    if body.forced_tools:
        name_as_sent(request, "json_schema", "tools")
    inputs = [replace(one, timeout_s=timeout_s, caller=caller) for one in _inputs(body, parts)]
    form = ChatForm(
        with_logprobs=body.num_logprobs is not None,
        new_reader=_reader_of(body, parts),
        max_calls=1 if body.parallel_tool_calls is False else None,
    )
    return await _answer(request, parts, body, inputs, form)


def _inputs(body: OpenAIRequest, parts: Parts) -> list[GenerationInput]:
    if body.model != parts.generation.model_name:
        raise ModelNotFoundError(body.model)
    return body.inputs()


def _reader_of(body: ChatCompletionRequest, parts: Parts) -> Callable[[], ToolCallReader] | None:
    """Return what makes readers of the calls in an answer; None where no tool is offered.

    Raises:
        InvalidParameterError: It is not known how this model writes calls.
    """
    names = frozenset(tool.function.name for tool in body.offered_tools)
    if not names:
        return None
    if body.forced_tools:
        return partial(WholeReader, names)
    syntax = parts.generation.tool_syntax
    if syntax is None:
        raise InvalidParameterError(
            "tool_choice", "this model's calls cannot be told from text; send required, or a name"
        )
    return partial(TagsReader if syntax == "tags" else MarkerReader, names)


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
    inputs: list[GenerationInput],
    form: OpenAIForm,
) -> Response:
    created = int(time.time())
    service = parts.generation
    if body.stream:
        options = body.stream_options or StreamOptions()
        to_frames = partial(_frames, form=form, created=created, options=options)
        submit = partial(open_group, service, inputs=inputs)
        return await deliver_stream(request, submit, to_frames)

    def to_body(result: GenerationResult) -> BaseModel:
        fields = {"id": result.request_id, "created": created, "model": result.model}
        return form.whole(result.choices, {**fields, **_report_of(result.summaries)})

    return await deliver_whole(request, partial(complete_group, service, inputs=inputs), to_body)


def _report_of(summaries: Sequence[RequestSummary]) -> dict[str, Any]:
    """Return what is known of a request at its end."""
    reports = [_prompt_report(summary) for summary in summaries]
    if len(reports) == 1:
        return reports[0]
    usage = usage_of(
        sum(summary.num_prompt_tokens for summary in summaries),
        sum(summary.num_output_tokens for summary in summaries),
    )
    return {"usage": usage, "prompts": [PromptReport(**report) for report in reports]}


def _prompt_report(summary: RequestSummary) -> dict[str, Any]:
    report: dict[str, Any] = {
        "usage": usage_of(summary.num_prompt_tokens, summary.num_output_tokens),
        "kv_cache": kv_cache_of(summary.compression),
        "snapshot": summary.snapshot,
    }
    if (explanation := explanation_of(summary.compression)) is not None:
        report["explain"] = explanation
    return report


async def _frames(
    group: PromptGroup, *, form: OpenAIForm, created: int, options: StreamOptions
) -> AsyncIterator[str]:
    fields = {"id": group.request_id, "created": created, "model": group.model}

    def chunk(choices: Sequence[Any], more: Mapping[str, Any]) -> str:
        body = form.chunk(choices, {**fields, **more})
        return data_frame(body.model_dump_json(exclude_unset=True))

    def usage_so_far() -> dict[str, Any]:
        if not options.include_usage:
            return {}
        if not options.continuous_usage_stats:
            # OpenAI's chunks name it from the start, as null.
            return {"usage": None}
        return {"usage": usage_of(group.num_prompt_tokens, group.num_output_tokens)}

    begun: set[int] = set()
    async for event in group.events():
        if event.choice_index not in begun:
            begun.add(event.choice_index)
            if opening := form.opening(event.choice_index):
                yield chunk(opening, usage_so_far())
        if (piece := form.piece(event)) is not None:
            yield chunk([piece], usage_so_far())
    if options.include_usage:
        yield chunk([], _report_of(group.summaries))
    yield DONE_FRAME
