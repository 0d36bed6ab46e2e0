"""How each of OpenAI's routes words an answer, whole and in chunks."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from pydantic import BaseModel

from app.api.schemas.chat import (
    ChatAnswer,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatFinishReason,
)
from app.api.schemas.logprobs import ChatLogprobs, CompletionLogprobsWriter, chat_logprobs
from app.api.schemas.openai import Completion, CompletionChoice
from app.api.schemas.tools import MessageToolCall, ToolCallDelta, call_fields
from app.services.answers import ChoiceResult
from app.services.tool_calls import ToolCallReader, Written
from snapkv_core import FinishReason, TokenEvent


class OpenAIForm(Protocol):
    """The words of one route; `fields` are those that all answers have."""

    def whole(self, choices: Sequence[ChoiceResult], fields: Mapping[str, Any]) -> BaseModel:
        """Return the answer to a request that does not stream."""

    def chunk(self, choices: Sequence[Any], fields: Mapping[str, Any]) -> BaseModel:
        """Return a chunk with some pieces, or with none."""

    def opening(self, index: int) -> list[Any]:
        """Return the pieces that come before an answer's first text."""

    def piece(self, event: TokenEvent) -> Any | None:
        """Return the piece that an event brings; None where it brings nothing."""


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

    def piece(self, event: TokenEvent) -> CompletionChoice | None:
        """See `OpenAIForm.piece`."""
        if not (event.text or event.logprobs or event.finish_reason):
            return None
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
    """`/v1/chat/completions`: messages of the assistant, in which calls of tools are found."""

    def __init__(
        self,
        *,
        with_logprobs: bool,
        new_reader: Callable[[], ToolCallReader] | None = None,
        max_calls: int | None = None,
    ) -> None:
        """Word answers.

        Args:
            with_logprobs: Whether each token's log-probability is reported.
            new_reader: Makes what finds the calls of one answer; None where no tool is offered.
            max_calls: How many calls of an answer are reported; None is all.
        """
        self._with_logprobs = with_logprobs
        self._new_reader = new_reader
        self._max_calls = max_calls
        self._readers: dict[int, ToolCallReader] = {}
        self._num_calls: Counter[int] = Counter()

    def whole(self, choices: Sequence[ChoiceResult], fields: Mapping[str, Any]) -> ChatCompletion:
        """See `OpenAIForm.whole`."""
        return ChatCompletion(
            object="chat.completion",
            choices=[self._choice(choice) for choice in choices],
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

    def piece(self, event: TokenEvent) -> ChatChunkChoice | None:
        """See `OpenAIForm.piece`."""
        index = event.choice_index
        num_before = self._num_calls[index]
        written = self._read(index, event.text, is_end=event.finish_reason is not None)
        if not (written.text or written.calls or event.logprobs or event.finish_reason):
            return None
        delta = ChatDelta(content=written.text) if written.text else ChatDelta()
        if written.calls:
            delta.tool_calls = [
                ToolCallDelta(index=number, **call_fields(call))
                for number, call in enumerate(written.calls, num_before)
            ]
        return ChatChunkChoice(
            index=index,
            delta=delta,
            logprobs=self._logprobs(event),
            finish_reason=self._reason(index, event.finish_reason),
        )

    def _choice(self, choice: ChoiceResult) -> ChatChoice:
        written = self._read(choice.index, choice.text, is_end=True)
        message = ChatAnswer(role="assistant", content=written.text, refusal=None)
        if written.calls:
            message.content = written.text if written.text.strip() else None
            message.tool_calls = [MessageToolCall(**call_fields(call)) for call in written.calls]
        reason = self._reason(choice.index, choice.finish_reason)
        assert reason is not None, "a whole answer has ended"
        return ChatChoice(
            index=choice.index,
            message=message,
            logprobs=self._logprobs(choice),
            finish_reason=reason,
        )

    def _read(self, index: int, text: str, *, is_end: bool) -> Written:
        """Tell what is said from what is called."""
        if self._new_reader is None:
            return Written(text)
        if index not in self._readers:
            self._readers[index] = self._new_reader()
        reader = self._readers[index]
        written = reader.push(text)
        if is_end:
            rest = reader.finish()
            written = Written(written.text + rest.text, written.calls + rest.calls)
        if self._max_calls is not None:
            del written.calls[max(0, self._max_calls - self._num_calls[index]) :]
        self._num_calls[index] += len(written.calls)
        return written

    def _reason(self, index: int, reason: FinishReason | None) -> ChatFinishReason | None:
        is_called = reason is FinishReason.STOP and self._num_calls[index] > 0
        return "tool_calls" if is_called else reason

    def _logprobs(self, part: ChoiceResult | TokenEvent) -> ChatLogprobs | None:
        return chat_logprobs(part.logprobs) if self._with_logprobs else None
