"""The one JSON shape of every error."""

from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field


class Problem(BaseModel):
    """One thing that is wrong with a request."""

    model_config = ConfigDict(extra="forbid")

    param: str | None = Field(description="The field, or null when it is the body as a whole.")
    message: str = Field(description="What is wrong with it.")


class ErrorDetail(BaseModel):
    """What went wrong."""

    model_config = ConfigDict(extra="forbid")

    type: str = Field(description="Family of the error, for a client that only needs that.")
    code: str = Field(description="Stable name of the error.")
    message: str = Field(description="One sentence for people.")
    param: str | None = Field(default=None, description="The offending field, if it is one.")
    errors: list[Problem] = Field(default=[], description="Every problem, if there are several.")
    num_prompt_tokens: int | None = Field(
        default=None, description="Tokens of a prompt that is too long."
    )
    max_model_len: int | None = Field(default=None, description="Tokens the model's context holds.")
    needed_bytes: int | None = Field(
        default=None, description="KV cache of a request that can never fit."
    )
    available_bytes: int | None = Field(default=None, description="KV cache of the whole server.")
    requested: int | None = Field(default=None, description="What is above the caller's ceiling.")
    ceiling: int | None = Field(default=None, description="The most this caller may ask for.")


class ErrorBody(BaseModel):
    """Body of every answer whose status is 400 or above."""

    model_config = ConfigDict(extra="forbid")

    error: ErrorDetail


#: Errors of every route that asks for a key and for the engine, for the API description.
ENGINE_ERROR_RESPONSES: Final[dict[int | str, dict[str, Any]]] = {
    401: {"model": ErrorBody, "description": "No known API key was sent."},
    500: {"model": ErrorBody, "description": "An internal error."},
    503: {"model": ErrorBody, "description": "The model is loading or the server stops."},
}

#: Errors that every route that generates may answer with.
ERROR_RESPONSES: Final[dict[int | str, dict[str, Any]]] = ENGINE_ERROR_RESPONSES | {
    400: {"model": ErrorBody, "description": "The request can never fit."},
    403: {"model": ErrorBody, "description": "The caller may not ask for as much."},
    408: {"model": ErrorBody, "description": "The body did not arrive in time."},
    413: {"model": ErrorBody, "description": "The body is too large."},
    415: {"model": ErrorBody, "description": "The body is not declared as JSON."},
    429: {
        "model": ErrorBody,
        "description": "The queue is full, or the caller too fast; see Retry-After.",
    },
    500: {"model": ErrorBody, "description": "Generating the answer failed."},
    504: {"model": ErrorBody, "description": "The time was up before the answer was complete."},
}
