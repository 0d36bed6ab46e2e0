"""Bodies and answers of `POST /tokenize` and `POST /detokenize`."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from app.api.schemas.common import Text
from app.api.schemas.generate import Messages
from app.services.tokenizing import TokenizeResult
from snapkv_core import ChatMessage, InvalidParameterError, TokenizeRequest


class TokenizeBody(BaseModel):
    """A text whose tokens are asked for."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={"example": {"prompt": "The capital of France is"}},
    )

    model: Text | None = Field(None, description="The served model, or null.")
    prompt: Text | None = Field(
        None, description="Text to tokenise; exactly one of `prompt` and `messages`."
    )
    messages: Messages | None = Field(
        None, description="Conversation to render through the chat template and tokenise."
    )
    add_special_tokens: bool | None = Field(
        None,
        description="Add what the model expects around a prompt; null adds it to `prompt` and not "
        "to `messages`, whose template writes it, as generating does.",
    )
    add_generation_prompt: bool | None = Field(
        None,
        description="Only for `messages`: end with the beginning of the assistant's turn; null "
        "does.",
    )
    return_token_strs: bool = Field(
        False, description="Answer with the entries of the vocabulary as well."
    )
    return_offsets: bool = Field(
        False, description="Answer with the text, and the part of it that each token stands for."
    )

    def to_request(self, timeout_s: float | None) -> TokenizeRequest:
        """Return what the service takes.

        Raises:
            InvalidParameterError: Not exactly one of `prompt` and `messages` was given, or an
                option that does not belong to it.
        """
        if (self.prompt is None) == (self.messages is None):
            raise InvalidParameterError(
                "prompt", "exactly one of prompt and messages must be given"
            )
        if self.prompt is not None and self.add_generation_prompt is not None:
            raise InvalidParameterError("add_generation_prompt", "is only for messages")
        messages = tuple(ChatMessage(m.role, m.content) for m in self.messages or ())
        return TokenizeRequest(
            prompt=messages if self.prompt is None else self.prompt,
            add_special_tokens=self.add_special_tokens,
            add_generation_prompt=self.add_generation_prompt is not False,
            with_token_strs=self.return_token_strs,
            with_offsets=self.return_offsets,
            timeout_s=timeout_s,
        )


class TokenizeAnswer(BaseModel):
    """The tokens of a text."""

    count: int = Field(description="How many there are.")
    max_model_len: int = Field(description="Tokens that prompt and answer may have together.")
    tokens: list[int] = Field(description="Their ids.")
    token_strs: list[str] | None = Field(
        description="Their entries in the vocabulary, or null if they were not asked for."
    )
    text: str | None = Field(
        default=None, description="What was tokenised; only with `return_offsets`."
    )
    offsets: list[Annotated[list[int], Field(min_length=2, max_length=2)]] | None = Field(
        default=None,
        description="Per token the first character (Unicode code point) of `text` that it stands "
        "for, and the one behind its last; only with `return_offsets`. Tokens that are parts of "
        "one character overlap in it; an added token stands for none.",
    )


class DetokenizeBody(BaseModel):
    """Tokens whose text is asked for."""

    model_config = ConfigDict(
        extra="forbid", strict=True, json_schema_extra={"example": {"tokens": [504, 3575, 282]}}
    )

    model: Text | None = Field(None, description="The served model, or null.")
    # fail_fast: reporting each of a million wrong items would hold up the process for seconds.
    tokens: Annotated[list[int], Field(fail_fast=True)] = Field(description="Ids of the tokens.")


class DetokenizeAnswer(BaseModel):
    """The text of tokens."""

    prompt: str = Field(description="The text, special tokens included.")


def to_answer(result: TokenizeResult) -> TokenizeAnswer:
    """Build the JSON answer; what was not asked for is left unset."""
    found = result.tokenized
    answer = TokenizeAnswer(
        count=len(found.token_ids),
        max_model_len=result.max_model_len,
        tokens=list(found.token_ids),
        token_strs=None if found.token_strs is None else list(found.token_strs),
    )
    if found.offsets is not None:
        answer.text, answer.offsets = found.text, [list(span) for span in found.offsets]
    return answer
