"""The one table from what can go wrong to a status and a body.

The shape is the one that OpenAI clients read. A message repeats no prompt: of a caller's text only
field names and short choices such as a method, cut to 80 characters.
"""

import difflib
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from app.api.schemas.chat import ChatCompletionRequest
from app.api.schemas.errors import ErrorBody, ErrorDetail, Problem
from app.api.schemas.generate import GenerateRequest
from app.api.schemas.openai import CompletionRequest
from app.api.schemas.tokenize import DetokenizeBody, TokenizeBody
from app.services.access import AccessDeniedError
from app.services.ceilings import OverCeilingError
from app.services.engine_host import EngineNotReadyError, EngineState
from app.services.rate_limits import RateLimitedError
from snapkv_core import (
    DeadlineExceededError,
    EngineStoppedError,
    GenerationFailedError,
    InvalidParameterError,
    PromptTooLongError,
    QueueFullError,
    RequestTooLargeError,
)

INVALID_REQUEST: Final = "invalid_request_error"
AUTHENTICATION: Final = "authentication_error"
PERMISSION: Final = "permission_error"
RATE_LIMIT: Final = "rate_limit_error"
UNAVAILABLE: Final = "service_unavailable_error"
TIMEOUT: Final = "timeout_error"
SERVER: Final = "server_error"

OPENAI_PREFIX: Final = "/v1/"

STOPPED_RETRY_AFTER_S: Final = 10.0
MAX_REPORTED_PROBLEMS: Final = 20
MAX_SHOWN_NAME_CHARS: Final = 80

_STATE_CODES: Final[Mapping[EngineState, str]] = {
    EngineState.LOADING: "engine_loading",
    EngineState.DRAINING: "draining",
    EngineState.FAILED: "engine_failed",
}

_HTTP_CODES: Final[Mapping[int, str]] = {
    400: "bad_request",
    404: "not_found",
    405: "method_not_allowed",
    408: "body_timeout",
    413: "body_too_large",
    415: "unsupported_media_type",
    422: "invalid_body",
}

#: The core's name of a field -> the name on OpenAI's routes.
_OPENAI_NAMES: Final[Mapping[str, str]] = {
    "json_schema": "response_format",
    "max_new_tokens": "max_tokens",
}

#: Where a request's state says which names its caller used instead.
_SENT_NAMES: Final = "sent_names"
#: Whose fields are suggested where a name is misspelt.
_BODIES: Final[Mapping[str, type[BaseModel]]] = {
    "/detokenize": DetokenizeBody,
    "/generate": GenerateRequest,
    "/tokenize": TokenizeBody,
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
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
    "too_long": "is too long",
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


class ModelNotFoundError(Exception):
    """A request names another model than the one that is served."""

    def __init__(self, model: str) -> None:
        super().__init__(f"the model {_shown(model)!r} does not exist; GET /v1/models names it")


def reply_for(request: Request, error: Exception) -> ErrorReply:
    """Return how an exception is answered; one that is not in the table is a bare 500.

    OpenAI's clients expect a 400 for any bad value. The code of the error is left in the request's
    state, for the metrics.
    """
    is_openai = request.url.path.startswith(OPENAI_PREFIX)
    reply = _reply(500, SERVER, "internal_error", "an internal error; the request can be retried")
    if isinstance(error, RequestValidationError):
        body = _BODIES.get(request.url.path)
        reply = _validation(error, () if body is None else body.model_fields)
    else:
        for kind, build in _TABLE:
            if isinstance(error, kind):
                reply = build(error)
                break
    request.state.error_code = reply.detail.code
    if not is_openai:
        return reply
    if isinstance(error, InvalidParameterError | OverCeilingError):
        names = getattr(request.state, _SENT_NAMES, _OPENAI_NAMES)
        reply = replace(reply, detail=_renamed(reply.detail, names))
    return replace(reply, status=400) if reply.status == 422 else reply


def response_for(request: Request, error: Exception) -> JSONResponse:
    """Return the response to an exception."""
    reply = reply_for(request, error)
    return JSONResponse(reply.body(), status_code=reply.status, headers=dict(reply.headers))


def install_error_handlers(app: FastAPI) -> None:
    """Let every error of the table be answered by it; others are left to the middleware."""

    async def handle(request: Request, error: Exception) -> JSONResponse:
        return response_for(request, error)

    app.add_exception_handler(RequestValidationError, handle)
    for kind, _ in _TABLE:
        app.add_exception_handler(kind, handle)


def name_as_sent(request: Request, ours: str, sent: str) -> None:
    """Let errors of a request name a field of the core as its caller has spelt it."""
    known = getattr(request.state, _SENT_NAMES, _OPENAI_NAMES)
    setattr(request.state, _SENT_NAMES, {**known, ours: sent})


def _renamed(detail: ErrorDetail, names: Mapping[str, str]) -> ErrorDetail:
    """Name the core's fields as OpenAI's clients spell them."""
    ours = re.compile(r"\b(?:" + "|".join(names) + r")\b")
    return detail.model_copy(
        update={
            "param": names.get(detail.param or "", detail.param),
            "message": ours.sub(lambda match: names[match[0]], detail.message),
        }
    )


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


def _request_too_large(error: RequestTooLargeError) -> ErrorReply:
    return _reply(
        400,
        INVALID_REQUEST,
        "request_too_large",
        str(error),
        param=error.field,
        needed_bytes=error.needed_bytes,
        available_bytes=error.available_bytes,
    )


def _invalid_parameter(error: InvalidParameterError) -> ErrorReply:
    return _reply(422, INVALID_REQUEST, "invalid_value", str(error), param=error.field)


def _queue_full(error: QueueFullError) -> ErrorReply:
    return _reply(429, RATE_LIMIT, "queue_full", str(error), retry_after_s=error.retry_after_s)


def _not_ready(error: EngineNotReadyError) -> ErrorReply:
    # Whoever keeps a connection to a server that drains would come back to it.
    is_leaving = error.state is EngineState.DRAINING
    return _reply(
        503,
        UNAVAILABLE,
        _STATE_CODES[error.state],
        str(error),
        retry_after_s=error.retry_after_s,
        headers={"Connection": "close"} if is_leaving else None,
    )


def _stopped(error: EngineStoppedError) -> ErrorReply:
    return _reply(
        503, UNAVAILABLE, "engine_stopped", str(error), retry_after_s=STOPPED_RETRY_AFTER_S
    )


def _deadline(error: DeadlineExceededError) -> ErrorReply:
    return _reply(504, TIMEOUT, "deadline_exceeded", str(error))


def _model_not_found(error: ModelNotFoundError) -> ErrorReply:
    return _reply(404, INVALID_REQUEST, "model_not_found", str(error), param="model")


def _denied(error: AccessDeniedError) -> ErrorReply:
    return _reply(
        401, AUTHENTICATION, "unauthorized", str(error), headers={"WWW-Authenticate": "Bearer"}
    )


def _over_ceiling(error: OverCeilingError) -> ErrorReply:
    return _reply(
        403,
        PERMISSION,
        "over_ceiling",
        str(error),
        param=error.field,
        requested=error.requested,
        ceiling=error.ceiling,
    )


def _rate_limited(error: RateLimitedError) -> ErrorReply:
    return _reply(429, RATE_LIMIT, "rate_limited", str(error), retry_after_s=error.retry_after_s)


def _failed(error: GenerationFailedError) -> ErrorReply:
    return _reply(500, SERVER, "generation_failed", str(error))


def _http(error: HTTPException) -> ErrorReply:
    status = error.status_code
    default_phrase = HTTPStatus(status).phrase
    message = default_phrase.lower() if error.detail == default_phrase else error.detail
    kind = INVALID_REQUEST if status < 500 else SERVER
    code = _HTTP_CODES.get(status, f"http_{status}")
    return _reply(status, kind, code, message, headers=error.headers)


def _validation(error: RequestValidationError, known: Collection[str]) -> ErrorReply:
    problems = [_problem(detail, known) for detail in error.errors()[:MAX_REPORTED_PROBLEMS]]
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


def _problem(detail: Mapping[str, Any], known: Collection[str]) -> Problem:
    path: Sequence[str | int] = detail["loc"][1:]  # the first part says where: in the body
    param = ".".join(_shown(part) for part in path) or None
    kind = detail["type"]
    if kind == "extra_forbidden":
        close = difflib.get_close_matches(str(path[-1])[:100], known, n=1)
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
    (RequestTooLargeError, _request_too_large),
    (InvalidParameterError, _invalid_parameter),
    (QueueFullError, _queue_full),
    (EngineNotReadyError, _not_ready),
    (EngineStoppedError, _stopped),
    (DeadlineExceededError, _deadline),
    (GenerationFailedError, _failed),
    (ModelNotFoundError, _model_not_found),
    (AccessDeniedError, _denied),
    (OverCeilingError, _over_ceiling),
    (RateLimitedError, _rate_limited),
    (HTTPException, _http),
)
