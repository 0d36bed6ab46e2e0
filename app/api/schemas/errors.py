"""The one JSON shape of every error."""

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


class ErrorBody(BaseModel):
    """Body of every answer whose status is 400 or above."""

    model_config = ConfigDict(extra="forbid")

    error: ErrorDetail
