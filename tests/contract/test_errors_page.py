"""The page about errors has a row for each code, and says of it what the table in the code says."""

import re

import pytest
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from app.api.errors import ErrorReply, ModelNotFoundError, reply_for
from app.services.access import AccessDeniedError
from app.services.ceilings import OverCeilingError
from app.services.engine_host import EngineNotReadyError, EngineState
from app.services.rate_limits import RateLimitedError
from app.telemetry.metrics import ERROR_REASONS
from snapkv_core import (
    DeadlineExceededError,
    EngineStoppedError,
    GenerationFailedError,
    InvalidParameterError,
    PromptTooLongError,
    QueueFullError,
    RequestTooLargeError,
)
from tests.support.markdown import ROOT

PAGE = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
ROWS = {
    code: (statuses, kind)
    for code, statuses, kind in re.findall(
        r"^\| `(\w+)` \| ([0-9, ]+) \| `(\w+)` \|", PAGE, re.MULTILINE
    )
}
#: One of each kind that a request can end with.
RAISED: list[Exception] = [
    PromptTooLongError("prompt", num_prompt_tokens=9, max_new_tokens=1, max_model_len=8),
    RequestTooLargeError("prompt", needed_bytes=9, available_bytes=8),
    InvalidParameterError("n", "is wrong"),
    RequestValidationError([{"type": "missing", "loc": ("body", "prompt"), "msg": "x"}]),
    QueueFullError(3, 1.0),
    RateLimitedError("too fast", 1.0),
    OverCeilingError("n", "too many", requested=3, ceiling=2),
    *(
        EngineNotReadyError(state)
        for state in (EngineState.LOADING, EngineState.DRAINING, EngineState.FAILED)
    ),
    EngineStoppedError("stopped"),
    DeadlineExceededError("late"),
    GenerationFailedError("failed"),
    ModelNotFoundError("other"),
    AccessDeniedError(),
    RuntimeError("a bug"),
    *(HTTPException(status) for status in (400, 404, 405, 408, 413, 415, 422)),
]


def reply(error: Exception, path: str) -> ErrorReply:
    """Answer an exception of a request to a route."""
    scope = {"type": "http", "path": path, "method": "POST", "headers": [], "server": ("x", 80)}
    return reply_for(Request(scope), error)


def test_every_code_has_a_row_and_an_exception() -> None:
    """A client that left gets no answer, and so no row."""
    codes = set(ERROR_REASONS) - {"client_left"}
    assert set(ROWS) == codes
    assert {reply(error, "/generate").detail.code for error in RAISED} == codes


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_status_and_type_are_those_of_the_row(error: Exception) -> None:
    """On `/generate` the first status, on OpenAI's routes the last."""
    own, openais = reply(error, "/generate"), reply(error, "/v1/completions")
    statuses, kind = ROWS[own.detail.code]
    listed = statuses.split(", ")
    assert (str(own.status), str(openais.status)) == (listed[0], listed[-1])
    assert own.detail.type == openais.detail.type == kind
    assert own.detail.code == openais.detail.code


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_what_can_be_tried_again_says_when(error: Exception) -> None:
    found = reply(error, "/generate")
    assert ("Retry-After" in found.headers) is (found.status in (429, 503))
