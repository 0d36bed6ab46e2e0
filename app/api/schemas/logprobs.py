"""Log-probabilities as OpenAI's two routes word them."""

import codecs
from collections.abc import Iterable
from typing import Final

from pydantic import BaseModel, Field

from snapkv_core import PositionLogprobs, TokenLogprob

#: JSON has no infinity; OpenAI's API gives this for what is next to impossible.
LOWEST_LOGPROB: Final = -9999.0


class ChatLogprob(BaseModel):
    """A token and how likely the model thought it."""

    token: str = Field(description="Its text; U+FFFD where it is half a character.")
    logprob: float
    bytes: list[int] = Field(description="The bytes that it stands for.")


class ChatTokenLogprobs(ChatLogprob):
    """A token of the answer, and the likeliest ones there."""

    top_logprobs: list[ChatLogprob]


class ChatLogprobs(BaseModel):
    """The log-probabilities of an answer, or of a piece of it."""

    content: list[ChatTokenLogprobs]
    refusal: None


class CompletionLogprobs(BaseModel):
    """The log-probabilities of a text, or of a piece of it; one item for each token."""

    tokens: list[str] = Field(
        description="Their texts; `bytes:` and the bytes in hexadecimal for half a character."
    )
    token_logprobs: list[float | None] = Field(
        description="Null for a prompt's first token, which has nothing before it."
    )
    top_logprobs: list[dict[str, float] | None] = Field(
        description="The likeliest tokens, and the one that is there."
    )
    text_offset: list[int] = Field(description="Where each begins, in characters of the text.")


def chat_logprobs(positions: Iterable[PositionLogprobs]) -> ChatLogprobs:
    """Return what `/v1/chat/completions` says."""
    return ChatLogprobs(
        content=[
            ChatTokenLogprobs(
                **_chat_fields(each.chosen),
                top_logprobs=[ChatLogprob(**_chat_fields(token)) for token in each.top],
            )
            for each in positions
        ],
        refusal=None,
    )


class CompletionLogprobsWriter:
    """Words the tokens of one text piece by piece, since offsets go on."""

    def __init__(self) -> None:
        self._num_chars = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("ignore")

    def write(self, positions: Iterable[PositionLogprobs]) -> CompletionLogprobs:
        """Return what `/v1/completions` says of the next tokens."""
        written = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for each in positions:
            written.text_offset.append(self._num_chars)
            written.tokens.append(_spelt(each.chosen))
            written.token_logprobs.append(_finite(each.chosen.logprob))
            written.top_logprobs.append(_likeliest(each))
            if not each.chosen.is_special:
                self._num_chars += len(self._decoder.decode(each.chosen.token))
        return written


def _likeliest(position: PositionLogprobs) -> dict[str, float] | None:
    named = {
        _spelt(token): logprob
        for token in (*position.top, position.chosen)
        if (logprob := _finite(token.logprob)) is not None
    }
    return named or None


def _chat_fields(token: TokenLogprob) -> dict[str, object]:
    return {
        "token": token.token.decode("utf-8", "replace"),
        "logprob": _finite(token.logprob),
        "bytes": list(token.token),
    }


def _spelt(token: TokenLogprob) -> str:
    try:
        return token.token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.token)


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LOWEST_LOGPROB)
