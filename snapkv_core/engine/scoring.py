"""Log-probabilities and logits of given tokens, read outside the queue of an idle engine."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from snapkv_core.config import CompressionConfig
from snapkv_core.engine.parts import EngineParts
from snapkv_core.engine.step_plan import DecodeBatch, whole_prompt
from snapkv_core.errors import InvalidParameterError
from snapkv_core.events import GenerationRequest
from snapkv_core.kv_cache.snapshot import PromptSnapshot
from snapkv_core.sampling_params import SamplingParams
from snapkv_core.sequence import Sequence


class Scorer:
    """Reads prompts in one go on an engine's parts; the engine's thread uses it."""

    def __init__(
        self,
        parts: EngineParts,
        prepare: Callable[[GenerationRequest], tuple[Sequence, ...]],
    ) -> None:
        self._parts = parts
        self._prepare = prepare

    @torch.inference_mode()
    def score(
        self,
        prompt_ids: tuple[int, ...],
        output_ids: tuple[int, ...],
        compression: CompressionConfig,
        snapshot: PromptSnapshot | None = None,
    ) -> Tensor:
        """See `Engine.score`; with a snapshot of the prompt, go on from that instead."""
        runner = self._parts.runner
        sampling = SamplingParams(max_new_tokens=len(output_ids))
        with self._read(prompt_ids, sampling, compression, snapshot) as (sequence, logits):
            rows = [logits]
            sequences = {sequence.seq_id: sequence}
            for token_id in output_ids[:-1]:
                sequence.output_ids.append(token_id)
                rows.append(runner.run_batch(DecodeBatch((sequence.seq_id,)), sequences)[0])
        return torch.stack(rows)

    @torch.inference_mode()
    def prompt_logprobs(self, prompt_ids: tuple[int, ...], start: int, end: int) -> Tensor:
        """See `Engine.prompt_logprobs`."""
        if not 1 <= start < end <= len(prompt_ids):
            raise InvalidParameterError(
                "start", f"[{start}, {end}) is no range of the tokens 1 to {len(prompt_ids) - 1}"
            )
        sampling, full = SamplingParams(max_new_tokens=1), CompressionConfig(method="full")
        with self._read(prompt_ids, sampling, full) as (sequence, _):
            found = self._parts.runner.prompt_logprobs(sequence.seq_id, start, end)
            return torch.tensor([each.logprob for each in found])

    @contextmanager
    def _read(
        self,
        prompt_ids: tuple[int, ...],
        sampling: SamplingParams,
        compression: CompressionConfig,
        snapshot: PromptSnapshot | None = None,
    ) -> Iterator[tuple[Sequence, Tensor]]:
        """Read a prompt to its end; gives its sequence and its last token's logits."""
        parts = self._parts
        (sequence,) = self._prepare(GenerationRequest("scored", prompt_ids, sampling, compression))
        parts.ledger.reserve((sequence,))
        try:
            sequences, logits = {sequence.seq_id: sequence}, None
            slices = whole_prompt(sequence, parts.layout.num_layers, parts.max_slice_tokens)
            if snapshot is not None:
                parts.runner.hold_snapshot(sequence.seq_id, snapshot)
                (whole,) = whole_prompt(sequence, 1, sequence.num_prompt_tokens)
                slices = iter((replace(whole, is_restore=True),))
            for part in slices:
                logits = parts.runner.run_slice(part, sequences)
            assert logits is not None, "the last slice gives logits"
            yield sequence, logits
        finally:
            parts.runner.release(sequence.seq_id)
            parts.ledger.release(sequence)
