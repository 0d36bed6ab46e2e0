"""The one table from what can go wrong to a status and a body.

The shape is the one that OpenAI clients read. A message repeats no prompt: of a caller's text only
field names and short choices such as a method, cut to 80 characters.
"""

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from app.api.schemas.errors import ErrorBody, ErrorDetail, Problem
from app.api.schemas.generate import GenerateRequest
from app.services.engine_host import EngineNotReadyError
from snapkv_core import (
    EngineStoppedError,
    GenerationFailedError,
    InvalidParameterError,
    PromptTooLongError,
    QueueFullError,
)

INVALID_REQUEST: Final = "invalid_request_error"
RATE_LIMIT: Final = "rate_limit_error"
UNAVAILABLE: Final = "service_unavailable_error"
SERVER: Final = "server_error"

STOPPED_RETRY_AFTER_S: Final = 10.0
MAX_REPORTED_PROBLEMS: Final = 20
MAX_SHOWN_NAME_CHARS: Final = 80

_HTTP_CODES: Final[Mapping[int, str]] = {
    400: "bad_request",
    404: "not_found",
    405: "method_not_allowed",
    413: "body_too_large",
    415: "unsupported_media_type",
    422: "invalid_body",
}

#: Kinds of pydantic's errors, in words of JSON instead of Python.
_MESSAGES: Final[Mapping[str, str]] = {
    "bool_type": "must be true or false",
    "finite_number": "must be a finite number",
    "float_type": "must be a number",
    "int_type": "must be an integer",
    "list_type": "must be a list",
    "missing": "is missing",
    "model_attributes_type": "must be a JSON object",
    "model_type": "must be a JSON object",
    "string_too_long": "is too long",
    "string_too_short": "must not be empty",
    "string_type": "must be a string",
    "string_unicode": "has a field whose name is not valid Unicode",
    "too_short": "must not be empty",
}


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """Status, headers and body of an error."""

    status: int
    detail: ErrorDetail
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """Return the JSON body; fields that do not apply are left out."""
        body = ErrorBody(error=self.detail).model_dump(mode="json", exclude_defaults=True)
        body["error"].setdefault("param", None)
        return body


def reply_for(error: Exception) -> ErrorReply:
    """Return how an exception is answered; one that is not in the table is a bare 500."""
    for kind, build in _TABLE:
        if isinstance(error, kind):
            return build(error)
    return _reply(500, SERVER, "internal_error", "an internal error; the request can be retried")


def response_for(error: Exception) -> JSONResponse:
    """Return the response to an exception."""
    reply = reply_for(error)
    return JSONResponse(reply.body(), status_code=reply.status, headers=dict(reply.headers))


def install_error_handlers(app: FastAPI) -> None:
    """Let every error of the table be answered by it; others are left to the middleware."""

    async def handle(request: Request, error: Exception) -> JSONResponse:
        del request  # the answer depends on the error alone
        return response_for(error)

    for kind, _ in _TABLE:
        app.add_exception_handler(kind, handle)


def _reply(
    status: int,
    kind: str,
    code: str,
    message: str,
    *,
    retry_after_s: float | None = None,
    headers: Mapping[str, str] | None = None,
    **fields: Any,
) -> ErrorReply:
    given = dict(headers or {})
    if retry_after_s is not None:
        given["Retry-After"] = str(max(1, math.ceil(retry_after_s)))
    return ErrorReply(status, ErrorDetail(type=kind, code=code, message=message, **fields), given)


def _prompt_too_long(error: PromptTooLongError) -> ErrorReply:
    return _reply(
        400,
        INVALID_REQUEST,
        "prompt_too_long",
        str(error),
        param=error.field,
        num_prompt_tokens=error.num_prompt_tokens,
        max_model_len=error.max_model_len,
    )


def _invalid_parameter(error: InvalidParameterError) -> ErrorReply:
    return _reply(422, INVALID_REQUEST, "invalid_value", str(error), param=error.field)


def _queue_full(error: QueueFullError) -> ErrorReply:
    return _reply(429, RATE_LIMIT, "queue_full", str(error), retry_after_s=error.retry_after_s)


def _not_ready(error: EngineNotReadyError) -> ErrorReply:
    code = f"engine_{error.state.value}"
    return _reply(503, UNAVAILABLE, code, str(error), retry_after_s=error.retry_after_s)


def _stopped(error: EngineStoppedError) -> ErrorReply:
    return _reply(
        503, UNAVAILABLE, "engine_stopped", str(error), retry_after_s=STOPPED_RETRY_AFTER_S
    )


def _failed(error: GenerationFailedError) -> ErrorReply:
    return _reply(500, SERVER, "generation_failed", str(error))


def _http(error: HTTPException) -> ErrorReply:
    status = error.status_code
    default_phrase = HTTPStatus(status).phrase
    message = default_phrase.lower() if error.detail == default_phrase else error.detail
    kind = INVALID_REQUEST if status < 500 else SERVER
    code = _HTTP_CODES.get(status, f"http_{status}")
    return _reply(status, kind, code, message, headers=error.headers)


def _validation(error: RequestValidationError) -> ErrorReply:
    problems = [_problem(detail) for detail in error.errors()[:MAX_REPORTED_PROBLEMS]]
    message = "; ".join(
        problem.message if problem.param is None else f"{problem.param}: {problem.message}"
        for problem in problems
    )
    return _reply(
        422,
        INVALID_REQUEST,
        "invalid_value",
        message,
        param=problems[0].param,
        errors=problems if len(problems) > 1 else [],
    )


def _problem(detail: Mapping[str, Any]) -> Problem:
    path: Sequence[str | int] = detail["loc"][1:]  # the first part says where: in the body
    param = ".".join(_shown(part) for part in path) or None
    kind = detail["type"]
    if kind == "extra_forbidden":
        close = difflib.get_close_matches(str(path[-1])[:100], GenerateRequest.model_fields, n=1)
        hint = f"; did you mean {close[0]}?" if close and len(path) == 1 else ""
        return Problem(param=param, message=f"unknown field{hint}")
    if kind == "missing" and param is None:
        return Problem(param=None, message="the body is empty; send a JSON object")
    if kind == "value_error":
        return Problem(param=param, message=detail["msg"].removeprefix("Value error, "))
    return Problem(param=param, message=_MESSAGES.get(kind, detail["msg"]))


def _shown(part: str | int) -> str:
    # An unknown field's name is the caller's: it may be megabytes or half a surrogate pair.
    text = str(part)[:MAX_SHOWN_NAME_CHARS]
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


#: First match wins, so a subclass stands above its base.
_TABLE: Final[Sequence[tuple[type[Exception], Callable[[Any], ErrorReply]]]] = (
    (PromptTooLongError, _prompt_too_long),
    (InvalidParameterError, _invalid_parameter),
    (QueueFullError, _queue_full),
    (EngineNotReadyError, _not_ready),
    (EngineStoppedError, _stopped),
    (GenerationFailedError, _failed),
    (RequestValidationError, _validation),
    (HTTPException, _http),
)
