"""How each of OpenAI's routes words an answer, whole and in chunks."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from pydantic import BaseModel

from app.api.schemas.chat import (
    ChatAnswer,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
)
from app.api.schemas.logprobs import ChatLogprobs, CompletionLogprobsWriter, chat_logprobs
from app.api.schemas.openai import Completion, CompletionChoice
from app.services.answers import ChoiceResult
from snapkv_core import TokenEvent


class OpenAIForm(Protocol):
    """The words of one route; `fields` are those that all answers have."""

    def whole(self, choices: Sequence[ChoiceResult], fields: Mapping[str, Any]) -> BaseModel:
        """Return the answer to a request that does not stream."""

    def chunk(self, choices: Sequence[Any], fields: Mapping[str, Any]) -> BaseModel:
        """Return a chunk with some pieces, or with none."""

    def opening(self, index: int) -> list[Any]:
        """Return the pieces that come before an answer's first text."""

    def piece(self, event: TokenEvent) -> Any:
        """Return the piece that an event brings."""


class CompletionForm:
    """`/v1/completions`: the text itself."""

    def __init__(self, *, with_logprobs: bool) -> None:
        self._with_logprobs = with_logprobs
        self._writers: dict[int, CompletionLogprobsWriter] = {}

    def whole(self, choices: Sequence[ChoiceResult], fields: Mapping[str, Any]) -> Completion:
        """See `OpenAIForm.whole`."""
        return self.chunk([self._choice(choice.index, choice) for choice in choices], fields)

    def chunk(self, choices: Sequence[CompletionChoice], fields: Mapping[str, Any]) -> Completion:
        """See `OpenAIForm.chunk`; it has the shape of a whole answer."""
        return Completion(object="text_completion", choices=list(choices), **fields)

    def opening(self, index: int) -> list[CompletionChoice]:
        """See `OpenAIForm.opening`."""
        del index
        return []

    def piece(self, event: TokenEvent) -> CompletionChoice:
        """See `OpenAIForm.piece`."""
        return self._choice(event.choice_index, event)

    def _choice(self, index: int, part: ChoiceResult | TokenEvent) -> CompletionChoice:
        logprobs = None
        if self._with_logprobs:
            writer = self._writers.setdefault(index, CompletionLogprobsWriter())
            logprobs = writer.write((*part.prompt_logprobs, *part.logprobs))
        return CompletionChoice(
            index=index, text=part.text, logprobs=logprobs, finish_reason=part.finish_reason
        )


class ChatForm:
    """`/v1/chat/completions`: messages of the assistant."""

    def __init__(self, *, with_logprobs: bool) -> None:
        self._with_logprobs = with_logprobs

    def whole(self, choices: Sequence[ChoiceResult], fields: Mapping[str, Any]) -> ChatCompletion:
        """See `OpenAIForm.whole`."""
        return ChatCompletion(
            object="chat.completion",
            choices=[
                ChatChoice(
                    index=choice.index,
                    message=ChatAnswer(role="assistant", content=choice.text, refusal=None),
                    logprobs=self._logprobs(choice),
                    finish_reason=choice.finish_reason,
                )
                for choice in choices
            ],
            **fields,
        )

    def chunk(
        self, choices: Sequence[ChatChunkChoice], fields: Mapping[str, Any]
    ) -> ChatCompletionChunk:
        """See `OpenAIForm.chunk`."""
        return ChatCompletionChunk(object="chat.completion.chunk", choices=list(choices), **fields)

    def opening(self, index: int) -> list[ChatChunkChoice]:
        """See `OpenAIForm.opening`: who speaks."""
        delta = ChatDelta(role="assistant", content="")
        return [ChatChunkChoice(index=index, delta=delta, logprobs=None, finish_reason=None)]

    def piece(self, event: TokenEvent) -> ChatChunkChoice:
        """See `OpenAIForm.piece`."""
        return ChatChunkChoice(
            index=event.choice_index,
            delta=ChatDelta(content=event.text) if event.text else ChatDelta(),
            logprobs=self._logprobs(event),
            finish_reason=event.finish_reason,
        )

    def _logprobs(self, part: ChoiceResult | TokenEvent) -> ChatLogprobs | None:
        return chat_logprobs(part.logprobs) if self._with_logprobs else None
