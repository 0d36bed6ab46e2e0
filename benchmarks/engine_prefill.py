"""Times the reading of a prompt by the engine against the model's own forward pass."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM

from benchmarks.engine_decode import dtype_name
from benchmarks.figures import Ratio
from benchmarks.machine import wait_for
from benchmarks.workload import SNAPKV, Sizes, token_ids
from snapkv_core import Engine, EngineConfig, GenerationRequest, SamplingParams, ensure_demo_model

#: The engine may be three per cent slower than the model's own forward pass.
_REQUIRED_PACE: Final = 0.97
_WARM_UP_TOKENS: Final = 64


@dataclass(frozen=True, slots=True)
class PrefillFigure:
    """One prompt length, read in two ways.

    Attributes:
        dtype: Number format of weights and activations.
        prompt_tokens: Tokens read.
        engine_ms: Median time until the engine's first token, scoring and selection included.
        transformers_ms: Median time of one call of the model on the whole prompt.
        engine_tokens_per_s: Prompt tokens per second of the engine.
        transformers_tokens_per_s: The same of the model's own forward pass.
    """

    dtype: str
    prompt_tokens: int
    engine_ms: float
    transformers_ms: float
    engine_tokens_per_s: float
    transformers_tokens_per_s: float


def measure_prefill(
    engine: Engine, sizes: Sizes, say: Callable[[str], None]
) -> tuple[list[PrefillFigure], list[Ratio]]:
    """Let the engine and transformers read the same prompts in turn.

    Args:
        engine: An engine with the slices that it would serve with.
        sizes: Lengths and turns.
        say: Told what is going on.
    """
    model = _own_model(engine)
    engine_read_ms(engine, _WARM_UP_TOKENS)
    transformers_read_ms(model, engine, _WARM_UP_TOKENS)
    figures = []
    for num_tokens in sizes.prefill_lengths:
        say(f"prefill: {num_tokens:,} tokens, engine and transformers in turn")
        ours_ms, own_ms = [], []
        for _ in range(sizes.prefill_rounds):
            ours_ms.append(engine_read_ms(engine, num_tokens))
            own_ms.append(transformers_read_ms(model, engine, num_tokens))
        figures.append(
            PrefillFigure(
                dtype=dtype_name(engine),
                prompt_tokens=num_tokens,
                engine_ms=median(ours_ms),
                transformers_ms=median(own_ms),
                engine_tokens_per_s=num_tokens / median(ours_ms) * 1e3,
                transformers_tokens_per_s=num_tokens / median(own_ms) * 1e3,
            )
        )
    return figures, [prefill_ratio(figure) for figure in figures]


def prefill_ratio(figure: PrefillFigure) -> Ratio:
    """Return the engine's pace in terms of transformers'."""
    return Ratio(
        f"engine/{figure.dtype}/prefill pace, engine over transformers, {figure.prompt_tokens}",
        figure.engine_tokens_per_s / figure.transformers_tokens_per_s,
        "higher",
        _REQUIRED_PACE,
    )


def engine_read_ms(engine: Engine, num_tokens: int) -> float:
    """Return the milliseconds from the first slice of a prompt to its first token."""
    prompt = token_ids(num_tokens, 0, engine.spec.vocab_size)
    sampling = SamplingParams(max_new_tokens=1, ignore_eos=True)
    output = engine.generate(GenerationRequest("prefill", prompt, sampling, SNAPKV))
    return output.summary.timings.prefill_ms


@torch.inference_mode()
def transformers_read_ms(model: Any, engine: Engine, num_tokens: int) -> float:
    """Return the milliseconds of one call on a whole prompt that keeps its KV cache."""
    ids = token_ids(num_tokens, 0, engine.spec.vocab_size)
    input_ids = torch.tensor([ids], device=engine.device)
    wait_for(engine.device)
    start_s = time.perf_counter()
    # Of the logits the last row only: nobody generating needs the others, which would cost more
    # than the layers.
    model(input_ids=input_ids, use_cache=True, logits_to_keep=1)
    wait_for(engine.device)
    return (time.perf_counter() - start_s) * 1e3


def model_source(config: EngineConfig) -> str | Path:
    """Return what transformers should open for the model that `config` names."""
    return ensure_demo_model(config.cache_dir) if config.model == "demo" else config.model


def _own_model(engine: Engine) -> Any:
    """Load the engine's model once more, with transformers' attention instead of the engine's."""
    return AutoModelForCausalLM.from_pretrained(
        model_source(engine.config),
        revision=engine.config.revision,
        dtype=engine.dtype,
        device_map={"": engine.device},
        attn_implementation="sdpa",
    )
