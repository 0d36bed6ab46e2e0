"""Times decode steps of several engines in turn, the prompts being read beforehand."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

from benchmarks.errors import BenchmarkError
from benchmarks.own_pages import give_own_pages
from benchmarks.workload import FULL, SNAPKV, Sizes, token_ids
from snapkv_core import (
    CompressionConfig,
    CompressionReport,
    Engine,
    EngineConfig,
    FinishReason,
    GenerationRequest,
    RequestSummary,
    SamplingParams,
    StepStats,
)

#: Answer tokens each sequence has room for: those of the timed steps, and those that the first
#: sequences get while the prompts of the others are read.
_MAX_NEW_TOKENS: Final = 256

#: Longer than all prompts of a run take together.
_REQUEST_TIMEOUT_S: Final = 6 * 3_600.0


@dataclass(frozen=True, slots=True)
class DecodeFigure:
    """Decode steps of one batch.

    Attributes:
        method: `full` or `snapkv`.
        dtype: Number format of weights and KV cache.
        prompt_tokens: Length of each sequence's prompt.
        batch_size: Sequences that get a token in each step.
        step_ms: Median time of a step, sampling included.
        tokens_per_s: Tokens of all sequences together at that pace.
        kv_bytes: Bytes that the KV cache holds for them.
    """

    method: str
    dtype: str
    prompt_tokens: int
    batch_size: int
    step_ms: float
    tokens_per_s: float
    kv_bytes: int


def decode_config(config: EngineConfig, max_batch_size: int) -> EngineConfig:
    """Return a configuration under which reading the prompts disturbs decoding the least.

    A prompt is read in a few steps instead of hundreds. The sequences before it get a token
    in each of them, and would otherwise be far longer than their prompts when timing begins.
    """
    return replace(
        config,
        max_num_seqs=max_batch_size,
        decode_gap_target_ms=600_000,
        request_timeout_s=_REQUEST_TIMEOUT_S,
    )


class _Watch:
    """Observer that counts the prompts read and keeps the last step."""

    def __init__(self) -> None:
        self.num_prompts_read = 0
        self.last_step = StepStats(0.0, 0.0, 0.0, 0.0, 0)

    def on_prompt_compressed(self, request_id: str, report: CompressionReport) -> None:
        del request_id, report  # that it came is what counts
        self.num_prompts_read += 1

    def on_request_finished(self, summary: RequestSummary) -> None:
        del summary

    def on_step(self, step: StepStats) -> None:
        self.last_step = step


class DecodeRun:
    """Some sequences on an engine of their own: read, timed for some steps at a time, ended."""

    def __init__(
        self,
        engine: Engine,
        compression: CompressionConfig,
        *,
        prompt_tokens: int,
        num_requests: int = 1,
        num_choices: int = 1,
        max_new_tokens: int = _MAX_NEW_TOKENS,
    ) -> None:
        """Describe `num_requests` distinct prompts with `num_choices` answers each.

        Each sequence gets pages of its own, whether it has a prompt of its own or not.
        """
        self._engine = engine
        self._compression = compression
        self._prompt_tokens = prompt_tokens
        self._num_choices = num_choices
        self._max_new_tokens = max_new_tokens
        self._ids = [f"decode-{index}" for index in range(num_requests)]
        self._watch = _Watch()
        self.batch_size = num_requests * num_choices

    def __enter__(self) -> "DecodeRun":
        """Read the prompts, one after another."""
        self._engine.observer = self._watch
        sampling = SamplingParams(
            max_new_tokens=self._max_new_tokens, ignore_eos=True, n=self._num_choices
        )
        for index, request_id in enumerate(self._ids):
            prompt = token_ids(self._prompt_tokens, index, self._engine.spec.vocab_size)
            self._engine.add_request(
                GenerationRequest(request_id, prompt, sampling, self._compression)
            )
        while self._watch.num_prompts_read < len(self._ids):
            self._step()
        if self._num_choices > 1:
            give_own_pages(self._engine)
        return self

    def __exit__(self, *_: object) -> None:
        """End the sequences and free their memory."""
        for request_id in self._ids:
            self._engine.abort(request_id)

    def keep(self, num_choices: int) -> None:
        """End all choices of the only request but the first ones."""
        (request_id,) = self._ids
        choices = self._engine._requests[request_id].group[num_choices : self._num_choices]
        if choices:
            self._engine._end(choices, FinishReason.ABORT)
        self._num_choices = self.batch_size = num_choices

    def time_steps(self, count: int) -> list[float]:
        """Return the seconds that `count` decode steps took, after one that is not timed.

        The one before pays for what the other engines left in the processor's caches.
        """
        self._step()
        times_s = []
        for _ in range(count):
            self._step()
            step = self._watch.last_step
            if step.prefill_s > 0 or step.num_decoded != self.batch_size:
                raise BenchmarkError(
                    f"a timed step decoded {step.num_decoded} sequences of {self.batch_size}"
                )
            times_s.append(step.decode_s)
        return times_s

    def figure(self, step_s: float) -> DecodeFigure:
        """Return the figure of a step that takes `step_s` seconds."""
        return DecodeFigure(
            method=self._compression.method,
            dtype=dtype_name(self._engine),
            prompt_tokens=self._prompt_tokens,
            batch_size=self.batch_size,
            step_ms=step_s * 1e3,
            tokens_per_s=self.batch_size / step_s,
            kv_bytes=self._engine.kv_bytes,
        )

    def _step(self) -> None:
        for event in self._engine.step():
            if event.finish_reason is not None:
                raise BenchmarkError(
                    f"{event.request_id} ended before it was measured "
                    f"({event.error or event.finish_reason.value}): give the KV cache more memory"
                )


def dtype_name(engine: Engine) -> str:
    """Return the number format of an engine, `float32` or the like."""
    return str(engine.dtype).removeprefix("torch.")


def measure_in_turn(
    runs: Sequence[DecodeRun], *, rounds: int, steps_per_round: int
) -> list[DecodeFigure]:
    """Time decode steps of each run in turn, so that a drift of the machine meets all alike.

    Args:
        runs: Runs whose prompts have been read.
        rounds: Turns that each run gets.
        steps_per_round: Steps timed in a turn.

    Returns:
        One figure per run, of its median step.
    """
    times_s: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for run, taken_s in zip(runs, times_s, strict=True):
            taken_s += run.time_steps(steps_per_round)
    return [run.figure(median(taken_s)) for run, taken_s in zip(runs, times_s, strict=True)]


def measure_grid(
    full: Engine, compressed: Engine, sizes: Sizes, say: Callable[[str], None]
) -> list[DecodeFigure]:
    """Measure each batch size at each prompt length, full and compressed in turn.

    The sequences are choices of one request, so that its prompt is read once; the largest batch
    comes first, and the smaller ones are what is left of it.
    """
    figures = []
    batch_sizes = sorted(sizes.batch_sizes, reverse=True)
    for prompt_tokens in sizes.prompt_lengths if batch_sizes else ():
        say(f"decode: up to {batch_sizes[0]} x {prompt_tokens:,} tokens")
        shape = {"prompt_tokens": prompt_tokens, "num_choices": batch_sizes[0]}
        with (
            DecodeRun(full, FULL, **shape) as one,
            DecodeRun(compressed, SNAPKV, **shape) as other,
        ):
            for batch_size in batch_sizes:
                for run in (one, other):
                    run.keep(batch_size)
                figures += measure_in_turn(
                    (one, other), rounds=sizes.rounds, steps_per_round=sizes.steps_per_round
                )
    return sorted(figures, key=lambda figure: (figure.prompt_tokens, figure.batch_size))
