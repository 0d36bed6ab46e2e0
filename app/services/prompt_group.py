"""One request with several prompts: a generation for each, followed as if it were one."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from app.services.answers import GenerationResult, whole_choices
from app.services.generation import Generation, GenerationService
from app.services.inputs import GenerationInput
from snapkv_core import InvalidParameterError, RequestSummary, SnapshotUse, TokenEvent


class PromptGroup:
    """The generations of one request; its choices are those of the first prompt first.

    Used by one task, like `Generation`, and to be closed whatever happens.
    """

    def __init__(self, request_id: str, generations: Sequence[Generation]) -> None:
        """Follow generations, of which there is at least one, all with as many choices."""
        self._generations = tuple(generations)
        # A single prompt's request has the name that the engine knows it by.
        self.request_id = generations[0].request_id if len(generations) == 1 else request_id
        self.model = generations[0].model
        self.num_choices = sum(each.num_choices for each in generations)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(each.num_prompt_tokens for each in self._generations)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all answers so far."""
        return sum(each.num_output_tokens for each in self._generations)

    @property
    def snapshots(self) -> tuple[SnapshotUse, ...]:
        """What a snapshot did for each prompt."""
        return tuple(each.snapshot for each in self._generations)

    @property
    def summaries(self) -> tuple[RequestSummary, ...]:
        """What the engine measured for each prompt; complete after the last event."""
        return tuple(each.summary for each in self._generations if each.summary is not None)

    async def events(self) -> AsyncIterator[TokenEvent]:
        """Yield the events of all prompts as they come; raises what the first failure raises."""
        if len(self._generations) == 1:
            async for event in self._generations[0].events():
                yield event
            return
        arrived: asyncio.Queue[TokenEvent | Exception | None] = asyncio.Queue()
        following = [
            asyncio.create_task(self._follow(index, arrived))
            for index in range(len(self._generations))
        ]
        try:
            num_open = len(following)
            while num_open:
                message = await arrived.get()
                if isinstance(message, Exception):
                    raise message
                if message is None:
                    num_open -= 1
                else:
                    yield message
        finally:
            for task in following:
                task.cancel()
            await asyncio.gather(*following, return_exceptions=True)

    async def aclose(self) -> None:
        """Abort what is unfinished and record it all; may be called again."""
        await asyncio.gather(*(each.aclose() for each in self._generations))

    async def _follow(
        self, index: int, arrived: "asyncio.Queue[TokenEvent | Exception | None]"
    ) -> None:
        generation = self._generations[index]
        first = index * generation.num_choices
        try:
            async for event in generation.events():
                arrived.put_nowait(replace(event, choice_index=first + event.choice_index))
        except Exception as error:
            arrived.put_nowait(error)
        else:
            arrived.put_nowait(None)


async def open_group(
    service: GenerationService, request_id: str, inputs: Sequence[GenerationInput]
) -> PromptGroup:
    """Submit all prompts of a request, or none of them.

    Raises:
        InvalidParameterError: There are more prompts than could ever be in flight.
        SnapKVError: Any error of `GenerationService.open`; one about a prompt says which.
    """
    if len(inputs) > service.max_in_flight:
        raise InvalidParameterError(
            "prompt", f"at most {service.max_in_flight} prompts here, got {len(inputs)}"
        )
    opened: list[Generation] = []
    try:
        for number, given in enumerate(inputs, 1):
            try:
                opened.append(await service.open(request_id, given))
            except InvalidParameterError as error:
                if len(inputs) > 1:
                    error.args = (f"prompt {number} of {len(inputs)}: {error}",)
                raise
    except BaseException:
        for generation in opened:
            await generation.aclose()
        raise
    return PromptGroup(request_id, opened)


async def complete_group(
    service: GenerationService, request_id: str, inputs: Sequence[GenerationInput]
) -> GenerationResult:
    """Submit all prompts of a request and wait for their whole answers; cancelling aborts them.

    Raises:
        SnapKVError: Any error of `GenerationService.complete`.
    """
    group = await open_group(service, request_id, inputs)
    try:
        choices = await whole_choices(group.events(), group.num_choices)
    finally:
        await group.aclose()
    return GenerationResult(group.request_id, group.model, choices, group.summaries)
