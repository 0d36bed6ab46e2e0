"""The HTTP part: the same load against our server and, when asked for, against another one."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import httpx

from benchmarks.completions import TIMEOUT, StreamRecord, find_target, stream_completion
from benchmarks.figures import Ratio, TimeLimit
from benchmarks.http_load import LoadFigure, measure_load
from benchmarks.mixed_scenario import MixedFigure, MixedPrompts, measure_mixed
from benchmarks.workload import Sizes, text_of

OURS = "this server"
OTHER = "other server"

#: What the project promises while a long prompt is read: the gap between two tokens of a running
#: stream, 99 of 100, and the first token of a short prompt.
_MOST_GAP_MS: Final = 1_000.0
_MOST_SHORT_TTFT_MS: Final = 2_000.0


@dataclass(slots=True)
class HttpFigures:
    """What the HTTP part found; one list per kind of figure."""

    load: list[LoadFigure] = field(default_factory=list)
    mixed: list[MixedFigure] = field(default_factory=list)
    ratios: list[Ratio] = field(default_factory=list)
    limits: list[TimeLimit] = field(default_factory=list)

    def add(self, other: "HttpFigures") -> None:
        """Take over the figures of another number format."""
        self.load += other.load
        self.mixed += other.mixed
        self.ratios += other.ratios
        self.limits += other.limits


async def measure_http(
    url: str,
    sizes: Sizes,
    say: Callable[[str], None],
    *,
    knobs: bool = True,
    compare_url: str | None = None,
    count_tokens: Callable[[str], int] | None = None,
) -> HttpFigures:
    """Run all loads, each against both servers in turn before the next one.

    Args:
        url: The server that is measured.
        sizes: How much to measure.
        say: Told what is going on.
        knobs: Whether compression fields are sent to it.
        compare_url: Another server that is given the same load without such fields.
        count_tokens: Tokenizer by which prompts are sized; None sizes by words.

    Raises:
        BenchmarkError: A figure could not be taken.
    """
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=TIMEOUT, limits=limits) as client:
        targets = [await find_target(client, OURS, url, knobs=knobs)]
        dtype = await _served_dtype(client, url)
        if compare_url is not None:
            targets.append(await find_target(client, OTHER, compare_url, knobs=False))
        for target in targets:
            # The first request of a process pays for what later ones find ready.
            warm_up = text_of(32, 0, count_tokens)
            await stream_completion(client, target, warm_up, max_tokens=4, record=StreamRecord())
        figures = HttpFigures()
        variants = itertools.count(1)
        for num_tokens in sizes.http_lengths:
            for num_streams in sizes.http_streams:
                # No prompt comes twice, so that no server can answer from a cache of prefixes.
                prompts = [
                    text_of(num_tokens, next(variants), count_tokens) for _ in range(num_streams)
                ]
                for target in targets:
                    say(f"{target.name}: {num_streams} x {num_tokens:,} prompt tokens")
                    figures.load.append(
                        await measure_load(
                            client,
                            target,
                            prompts,
                            aimed_prompt_tokens=num_tokens,
                            max_tokens=sizes.http_new_tokens,
                        )
                    )
        mixed = _mixed_prompts(sizes, count_tokens)
        for target in targets:
            say(f"{target.name}: {len(mixed.running)} streams meet a long and a short prompt")
            figures.mixed.append(await measure_mixed(client, target, mixed))
    figures.ratios = http_ratios(dtype, figures.load, figures.mixed)
    figures.limits = mixed_limits(dtype, figures.mixed)
    return figures


def http_ratios(
    dtype: str, load: Sequence[LoadFigure], mixed: Sequence[MixedFigure]
) -> list[Ratio]:
    """Return the ratios within our own server's figures."""
    part = f"http/{dtype}"
    ratios = []
    ours = [figure for figure in load if figure.target == OURS]
    for num_tokens in sorted({figure.aimed_prompt_tokens for figure in ours}):
        cells = [figure for figure in ours if figure.aimed_prompt_tokens == num_tokens]
        fewest = min(cells, key=lambda figure: figure.num_streams)
        most = max(cells, key=lambda figure: figure.num_streams)
        ratios.append(
            Ratio(
                f"{part}/output pace, {most.num_streams} streams over {fewest.num_streams}, "
                f"{num_tokens}",
                most.output_tokens_per_s / fewest.output_tokens_per_s,
                "higher",
            )
        )
    for figure in mixed:
        if figure.target != OURS:
            continue
        ratios += [
            Ratio(
                f"{part}/gap p50, while a long prompt is read over before",
                figure.reading.p50_ms / figure.quiet.p50_ms,
                "lower",
            ),
            Ratio(
                f"{part}/time to first token, short prompt over the long one before it",
                figure.short_ttft_ms / figure.long_ttft_ms,
                "lower",
            ),
        ]
    return ratios


def mixed_limits(dtype: str, mixed: Sequence[MixedFigure]) -> list[TimeLimit]:
    """Return what callers of our own server waited for beside what they are promised."""
    part = f"http/{dtype}"
    return [
        limit
        for figure in mixed
        if figure.target == OURS
        for limit in (
            TimeLimit(
                f"{part}/gap p99, while a long prompt is read",
                figure.reading.p99_ms,
                _MOST_GAP_MS,
            ),
            TimeLimit(
                f"{part}/time to first token, short prompt after a long one",
                figure.short_ttft_ms,
                _MOST_SHORT_TTFT_MS,
            ),
        )
    ]


def _mixed_prompts(sizes: Sizes, count_tokens: Callable[[str], int] | None) -> MixedPrompts:
    return MixedPrompts(
        running=[
            text_of(sizes.mixed_running_tokens, 10_000 + index, count_tokens)
            for index in range(sizes.mixed_running)
        ],
        long=text_of(sizes.mixed_long_tokens, 20_000, count_tokens),
        short=text_of(sizes.mixed_short_tokens, 30_000, count_tokens),
        delay_s=sizes.mixed_delay_s,
    )


async def _served_dtype(client: httpx.AsyncClient, url: str) -> str:
    """Return the number format that a server of ours reports, `unknown` for another's."""
    try:
        return str((await client.get(f"{url}/health/ready")).json()["dtype"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        return "unknown"
