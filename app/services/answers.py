"""Puts the events of a request together to whole answers."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

from snapkv_core import FinishReason, PositionLogprobs, RequestSummary, TokenEvent


@dataclass(frozen=True, slots=True)
class ChoiceResult:
    """One finished answer.

    Attributes:
        index: Which of the request's answers.
        text: The whole of it.
        finish_reason: Why it ended.
        logprobs: One for each of its tokens, where the request asked for them.
        prompt_logprobs: One for each token of the prompt, where the request asked for them.
    """

    index: int
    text: str
    finish_reason: FinishReason
    logprobs: tuple[PositionLogprobs, ...] = ()
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """A finished request.

    Attributes:
        request_id: Its name.
        model: Name of the model.
        choices: Its answers, those to the first prompt first.
        summaries: What the engine measured, one for each prompt.
    """

    request_id: str
    model: str
    choices: tuple[ChoiceResult, ...]
    summaries: tuple[RequestSummary, ...]


async def whole_choices(
    events: AsyncIterator[TokenEvent], num_choices: int
) -> tuple[ChoiceResult, ...]:
    """Read events to their end, which each choice must reach; raises what they raise."""
    collected: list[list[TokenEvent]] = [[] for _ in range(num_choices)]
    async for event in events:
        collected[event.choice_index].append(event)
    return tuple(_joined(index, pieces) for index, pieces in enumerate(collected))


def _joined(index: int, events: list[TokenEvent]) -> ChoiceResult:
    reason = events[-1].finish_reason
    assert reason is not None, "a choice's last event says why it ended"
    return ChoiceResult(
        index=index,
        text="".join(event.text for event in events),
        finish_reason=reason,
        logprobs=tuple(found for event in events for found in event.logprobs),
        prompt_logprobs=tuple(found for event in events for found in event.prompt_logprobs),
    )
