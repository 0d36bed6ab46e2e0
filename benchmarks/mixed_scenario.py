"""A long prompt and then a short one arrive while other streams run."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import httpx

from benchmarks.completions import StreamRecord, Target, stream_completion
from benchmarks.errors import BenchmarkError
from benchmarks.figures import Latency, gaps_s

#: Pieces each running stream has brought before the long prompt is sent: the pace to compare with.
_QUIET_PIECES: Final = 24
#: More than they can bring in the time; they are ended when the scenario is over.
_RUNNING_MAX_TOKENS: Final = 2_000
_LATE_MAX_TOKENS: Final = 8


@dataclass(frozen=True, slots=True)
class MixedPrompts:
    """Texts of the scenario.

    Attributes:
        running: Of the streams that run.
        long: Of the long request.
        short: Of the one that comes after it.
        delay_s: Seconds between these two.
    """

    running: Sequence[str]
    long: str
    short: str
    delay_s: float


@dataclass(frozen=True, slots=True)
class MixedFigure:
    """What the three kinds of callers saw.

    Attributes:
        target: Name of the server.
        num_running: Streams that ran.
        long_prompt_tokens: Tokens of the long prompt, as the server counts.
        short_prompt_tokens: The same of the short one.
        quiet: Gaps of the running streams before the long prompt came.
        reading: Gaps of the running streams from the long request until its first token.
        long_ttft_ms: Time to the long request's first token.
        short_ttft_ms: Time to the short request's first token.
        timeline_ms: For each gap of each running stream, its end since the long request was sent
            (negative before) and its length.
    """

    target: str
    num_running: int
    long_prompt_tokens: int
    short_prompt_tokens: int
    quiet: Latency
    reading: Latency
    long_ttft_ms: float
    short_ttft_ms: float
    timeline_ms: tuple[tuple[float, float], ...]


async def measure_mixed(
    client: httpx.AsyncClient, target: Target, prompts: MixedPrompts
) -> MixedFigure:
    """Run the scenario once.

    Raises:
        BenchmarkError: A stream failed, or a running one ended too early.
    """
    running = [StreamRecord() for _ in prompts.running]
    tasks = [
        asyncio.create_task(
            stream_completion(client, target, prompt, max_tokens=_RUNNING_MAX_TOKENS, record=record)
        )
        for prompt, record in zip(prompts.running, running, strict=True)
    ]
    try:
        await _until_running(tasks, running)
        long, short = StreamRecord(), StreamRecord()
        async with asyncio.TaskGroup() as late:
            late.create_task(_send(client, target, prompts.long, long))
            await asyncio.sleep(prompts.delay_s)
            late.create_task(_send(client, target, prompts.short, short))
        if any(task.done() for task in tasks):
            raise BenchmarkError(f"{target.name}: a running stream ended before the scenario did")
    except* BenchmarkError as failed:
        raise BenchmarkError(str(failed.exceptions[0])) from failed
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return mixed_figure(target.name, running, long, short)


def mixed_figure(
    target: str, running: Sequence[StreamRecord], long: StreamRecord, short: StreamRecord
) -> MixedFigure:
    """Turn the records into a figure.

    Raises:
        BenchmarkError: The running streams brought nothing while the long prompt was read.
    """
    all_running_s = max(record.pieces_s[0] for record in running)
    first_token_s = long.sent_s + long.ttft_s
    # A gap in which the long prompt came is no quiet one.
    before = [[at_s for at_s in record.pieces_s if at_s <= long.sent_s] for record in running]
    quiet = [gap for pieces_s in before for gap in gaps_s(pieces_s, all_running_s)]
    reading = [
        gap for record in running for gap in gaps_s(record.pieces_s, long.sent_s, first_token_s)
    ]
    if not quiet or not reading:
        raise BenchmarkError(f"{target}: the running streams brought nothing to compare")
    timeline_ms = sorted(
        ((later - long.sent_s) * 1e3, (later - earlier) * 1e3)
        for record in running
        for earlier, later in zip(record.pieces_s, record.pieces_s[1:], strict=False)
    )
    return MixedFigure(
        target=target,
        num_running=len(running),
        long_prompt_tokens=long.prompt_tokens,
        short_prompt_tokens=short.prompt_tokens,
        quiet=Latency.of_seconds(quiet),
        reading=Latency.of_seconds(reading),
        long_ttft_ms=long.ttft_s * 1e3,
        short_ttft_ms=short.ttft_s * 1e3,
        timeline_ms=tuple(timeline_ms),
    )


async def _send(
    client: httpx.AsyncClient, target: Target, prompt: str, record: StreamRecord
) -> None:
    await stream_completion(client, target, prompt, max_tokens=_LATE_MAX_TOKENS, record=record)


async def _until_running(
    tasks: Sequence[asyncio.Task[None]], running: Sequence[StreamRecord]
) -> None:
    """Return when the last stream has brought enough pieces beside all others."""
    while True:
        starts_s = [record.pieces_s[0] for record in running if record.pieces_s]
        if len(starts_s) == len(running):
            all_running_s = max(starts_s)
            counts = [sum(at > all_running_s for at in record.pieces_s) for record in running]
            if min(counts) >= _QUIET_PIECES:
                return
        for task in tasks:
            if task.done():
                await task
                raise BenchmarkError("a running stream ended before the scenario began")
        await asyncio.sleep(0.02)
