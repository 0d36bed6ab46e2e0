"""Concurrent streams that begin together: time to first token, gaps and throughput."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from benchmarks.completions import StreamRecord, Target, stream_completion
from benchmarks.errors import BenchmarkError
from benchmarks.figures import Latency, gaps_s


@dataclass(frozen=True, slots=True)
class LoadFigure:
    """Some streams of equal size against one server.

    Attributes:
        target: Name of the server.
        num_streams: Streams that began at the same time.
        aimed_prompt_tokens: Size the prompts were made for.
        prompt_tokens: Mean of what the server counted.
        output_tokens: Tokens of all answers together.
        ttft: Request until the first piece, the wait for the prompts before it included.
        inter_token: Gaps between the pieces of a stream, all streams together.
        output_tokens_per_s: All answers' tokens over the time from the first request to the last
            stream's end.
    """

    target: str
    num_streams: int
    aimed_prompt_tokens: int
    prompt_tokens: float
    output_tokens: int
    ttft: Latency
    inter_token: Latency
    output_tokens_per_s: float


async def measure_load(
    client: httpx.AsyncClient,
    target: Target,
    prompts: Sequence[str],
    *,
    aimed_prompt_tokens: int,
    max_tokens: int,
) -> LoadFigure:
    """Send all prompts at once and wait for every answer.

    Raises:
        BenchmarkError: A stream failed or was too short to have gaps.
    """
    records = [StreamRecord() for _ in prompts]
    await asyncio.gather(
        *(
            stream_completion(client, target, prompt, max_tokens=max_tokens, record=record)
            for prompt, record in zip(prompts, records, strict=True)
        )
    )
    return summarise(target.name, records, aimed_prompt_tokens)


def summarise(target: str, records: Sequence[StreamRecord], aimed_prompt_tokens: int) -> LoadFigure:
    """Turn the records of streams that have ended into a figure.

    Raises:
        BenchmarkError: There are no gaps between pieces to speak of.
    """
    gaps = [gap for record in records for gap in gaps_s(record.pieces_s)]
    if not gaps:
        raise BenchmarkError(f"{target}: no stream had two pieces of text")
    output_tokens = sum(record.output_tokens for record in records)
    start_s = min(record.sent_s for record in records)
    end_s = max(record.ended_s for record in records)
    return LoadFigure(
        target=target,
        num_streams=len(records),
        aimed_prompt_tokens=aimed_prompt_tokens,
        prompt_tokens=sum(record.prompt_tokens for record in records) / len(records),
        output_tokens=output_tokens,
        ttft=Latency.of_seconds([record.ttft_s for record in records]),
        inter_token=Latency.of_seconds(gaps),
        output_tokens_per_s=output_tokens / (end_s - start_s),
    )
