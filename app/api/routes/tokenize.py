"""`POST /tokenize` and `POST /detokenize`: texts to tokens and back, as the model sees them."""

from typing import Any, Final

from fastapi import APIRouter, Response

from app.api.dependencies import Caller, Parts, RequestTimeout
from app.api.errors import ModelNotFoundError
from app.api.schemas.errors import ERROR_RESPONSES, ErrorBody
from app.api.schemas.tokenize import (
    DetokenizeAnswer,
    DetokenizeBody,
    TokenizeAnswer,
    TokenizeBody,
    to_answer,
)
from app.api.strict_json import StrictJSONRoute

_RESPONSES: Final[dict[int | str, dict[str, Any]]] = ERROR_RESPONSES | {
    400: {"model": ErrorBody, "description": "The text is longer than the context by far."},
    404: {"model": ErrorBody, "description": "No such model."},
    422: {"model": ErrorBody, "description": "A value is not acceptable."},
}

router = APIRouter(route_class=StrictJSONRoute, tags=["tokenize"])


@router.post(
    "/tokenize",
    summary="Count and list the tokens of a text",
    response_model=TokenizeAnswer,
    responses=_RESPONSES,
)
async def tokenize(
    body: TokenizeBody, parts: Parts, caller: Caller, timeout_s: RequestTimeout
) -> Response:
    """Answer with the tokens of a prompt, or of messages as the chat template renders them."""
    del caller  # who calls makes no difference; that somebody may is found out by asking
    _require_model(body.model, parts)
    result = await parts.tokenizing.tokenize(body.to_request(timeout_s))
    return _json(to_answer(result).model_dump_json(exclude_unset=True))


@router.post(
    "/detokenize",
    summary="Turn tokens into text",
    response_model=DetokenizeAnswer,
    responses=_RESPONSES,
)
async def detokenize(
    body: DetokenizeBody, parts: Parts, caller: Caller, timeout_s: RequestTimeout
) -> Response:
    """Answer with the text of tokens, special ones included."""
    del caller  # as above
    _require_model(body.model, parts)
    text = await parts.tokenizing.detokenize(body.tokens, timeout_s)
    return _json(DetokenizeAnswer(prompt=text).model_dump_json())


def _require_model(model: str | None, parts: Parts) -> None:
    if model is not None and model != parts.generation.model_name:
        raise ModelNotFoundError(model)


def _json(content: str) -> Response:
    return Response(content, media_type="application/json")
