"""What snapshots cost in bytes, and what 8 bits cost in an answer that is forced on the engine."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Final

import torch
from torch import Tensor

from benchmarks.errors import BenchmarkError
from benchmarks.workload import SNAPKV
from snapkv_core import Engine, GenerationRequest, SamplingParams
from snapkv_core.engine.finding import Finding
from snapkv_core.engine.scoring import Scorer
from snapkv_core.engine.snapshot_model import snapshot_model
from snapkv_core.kv_cache.snapshot import PromptSnapshot
from snapkv_core.kv_cache.snapshot_codec import decode_snapshot, encode_snapshot

#: Prompts are cut out of these: English prose and tables, the same in every run.
_TEXTS: Final = sorted((Path(__file__).parent.parent / "docs").glob("*.md"))
_ANSWER_TOKENS: Final = 64


@dataclass(frozen=True, slots=True)
class Fidelity:
    """Snapshots in 8 bits against exact ones; all answers are forced to the text's own tokens.

    Attributes:
        dtype: Number format of the pool.
        num_prompts: Prompts.
        prompt_tokens: Tokens of each.
        answer_tokens: Tokens forced after each.
        exact_over_pool: Bytes of an exact snapshot over those of the pool's K and V.
        int8_over_pool: The same in 8 bits.
        exact_max_difference: Largest difference between a logit after an exact snapshot and after
            reading; 0 where an answer cannot differ.
        kl_mean: Kullback-Leibler divergence of the next token, exact from 8 bits, nats; mean over
            all tokens of all prompts.
        kl_p99: Its 99th percentile.
        kl_worst_prompt: Its mean over the prompt where that is largest.
        top1: Share of tokens where both find the same token likeliest.
        top1_worst_prompt: The same of the prompt where it is smallest.
    """

    dtype: str
    num_prompts: int
    prompt_tokens: int
    answer_tokens: int
    exact_over_pool: float
    int8_over_pool: float
    exact_max_difference: float
    kl_mean: float
    kl_p99: float
    kl_worst_prompt: float
    top1: float
    top1_worst_prompt: float


def measure_fidelity(engine: Engine, num_prompts: int, prompt_tokens: int) -> Fidelity:
    """Read prompts, keep them in both ways, and force the same answers after each.

    Args:
        engine: Idle; with room for one sequence.
        num_prompts: Prompts.
        prompt_tokens: Tokens of each.

    Raises:
        BenchmarkError: The engine gave no snapshot.
    """
    identity_of = snapshot_model(engine, "benchmark").identity_of
    scorer = Scorer(engine.parts, engine.prepare)
    divergences, agreements, sizes, differences = [], [], [], []
    for prompt_ids, answer_ids in _cut(engine, num_prompts, prompt_tokens):
        request = GenerationRequest(
            "fidelity", prompt_ids, SamplingParams(max_new_tokens=1), SNAPKV
        )
        snapshot, identity = _snapshot(engine, request), identity_of(engine.prepare(request)[0])
        exact_blob = encode_snapshot(snapshot, identity)
        int8_blob = encode_snapshot(snapshot, identity, body="int8")
        sizes.append((len(exact_blob) / snapshot.num_bytes, len(int8_blob) / snapshot.num_bytes))
        read = scorer.score(prompt_ids, answer_ids, SNAPKV)
        exact, int8 = (
            scorer.score(prompt_ids, answer_ids, SNAPKV, decode_snapshot(blob, identity))
            for blob in (exact_blob, int8_blob)
        )
        differences.append((exact - read).abs().max().item())
        divergences.append(_divergence(exact, int8))
        agreements.append((exact.argmax(-1) == int8.argmax(-1)).double().mean().item())
    all_divergences = torch.cat(divergences)
    return Fidelity(
        dtype=str(engine.dtype).removeprefix("torch."),
        num_prompts=num_prompts,
        prompt_tokens=prompt_tokens,
        answer_tokens=_ANSWER_TOKENS,
        exact_over_pool=median(exact for exact, _ in sizes),
        int8_over_pool=median(int8 for _, int8 in sizes),
        exact_max_difference=max(differences),
        kl_mean=all_divergences.mean().item(),
        kl_p99=all_divergences.quantile(0.99).item(),
        kl_worst_prompt=max(of_prompt.mean().item() for of_prompt in divergences),
        top1=fmean(agreements),
        top1_worst_prompt=min(agreements),
    )


def _cut(
    engine: Engine, num_prompts: int, prompt_tokens: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut prompts, and what follows them, evenly out of the texts."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in _TEXTS)
    token_ids = tuple(engine.tokenizer.encode(text))
    span = prompt_tokens + _ANSWER_TOKENS
    if len(token_ids) < span:
        raise BenchmarkError(f"the texts have {len(token_ids)} tokens, fewer than {span}")
    for number in range(num_prompts):
        start = number * (len(token_ids) - span) // max(1, num_prompts - 1)
        cut = token_ids[start : start + span]
        yield cut[:prompt_tokens], cut[prompt_tokens:]


def _snapshot(engine: Engine, request: GenerationRequest) -> PromptSnapshot:
    given: list[PromptSnapshot | None] = []
    engine.add(request, engine.prepare(request), Finding("stored", on_snapshot=given.append))
    while engine.has_work:
        engine.step()
    if not given or given[0] is None:
        raise BenchmarkError("the engine gave no snapshot of a prompt")
    return given[0]


def _divergence(exact: Tensor, other: Tensor) -> Tensor:
    """Return the divergence of each token, `[num_tokens]`, float64."""
    log_exact, log_other = exact.double().log_softmax(-1), other.double().log_softmax(-1)
    return (log_exact.exp() * (log_exact - log_other)).sum(-1)
