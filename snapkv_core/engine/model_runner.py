"""Step plan to step result; all device work of the engine starts here."""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import torch
from torch import Tensor

from snapkv_core.attention.base import AttentionBackend
from snapkv_core.engine.logprobs import raw_logprobs
from snapkv_core.engine.prefill import PrefillCursor
from snapkv_core.engine.restored_prompt import RestoredPrompt
from snapkv_core.engine.sampler import sample_token
from snapkv_core.engine.shaping import shaped
from snapkv_core.engine.step_plan import DecodeBatch, PrefillSlice, RawLogprobs, StepFailure
from snapkv_core.errors import InvalidParameterError
from snapkv_core.events import CompressionReport
from snapkv_core.kv_cache.manager import KVCacheManager
from snapkv_core.kv_cache.snapshot import PromptSnapshot
from snapkv_core.models.loader import LoadedModel
from snapkv_core.sequence import Sequence


@dataclass(slots=True)
class Sampled:
    """What choosing tokens gave, by sequence id.

    Attributes:
        tokens: The next token of each sequence that got one.
        logprobs: What the model thought there, for the sequences that asked.
        failures: Why each of the others got none.
    """

    tokens: dict[int, int] = field(default_factory=dict)
    logprobs: dict[int, RawLogprobs] = field(default_factory=dict)
    failures: dict[int, StepFailure] = field(default_factory=dict)

    def fail(self, seq_ids: SequenceOf[int], error: Exception) -> None:
        """Let sequences fail with what a step raised."""
        self.failures.update(dict.fromkeys(seq_ids, failure_of(error)))


def failure_of(error: Exception) -> StepFailure:
    """Say what failed without a stack trace; it is sent to the caller."""
    if isinstance(error, torch.OutOfMemoryError):
        return StepFailure("the device ran out of memory in a step of this request")
    return StepFailure(f"a step of this request failed ({type(error).__name__})")


class _DecodeContext:
    """Attention of one decode step: append each row's KV, attend to that sequence's own."""

    def __init__(
        self, seq_ids: tuple[int, ...], manager: KVCacheManager, backend: AttentionBackend
    ) -> None:
        self._step = manager.begin_step(seq_ids)
        self._num_seqs = len(seq_ids)
        self._manager = manager
        self._backend = backend
        self.num_positions = 0

    def attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float
    ) -> Tensor:
        self._manager.append(self._step, layer_idx, key[:, :, 0], value[:, :, 0])
        # Rows beyond the sequences are padding: what they attend to is never read.
        output = torch.zeros_like(query)
        output[: self._num_seqs, :, 0] = self._backend.decode(
            query[: self._num_seqs, :, 0], self._step.layers[layer_idx], scaling=scaling
        )
        return output


class ModelRunner:
    """Runs slices and batches against the KV store; owned by the engine thread."""

    def __init__(
        self,
        model: LoadedModel,
        backend: AttentionBackend,
        manager: KVCacheManager,
    ) -> None:
        self._decoder = model.decoder
        self._spec = model.spec
        self._backend = backend
        self._manager = manager
        self._decode_row_multiple = model.decode_row_multiple
        self._cursors: dict[int, PrefillCursor] = {}
        self._snapshots: dict[int, PromptSnapshot] = {}
        self._restored: dict[int, RestoredPrompt] = {}

    def hold_snapshot(self, seq_id: int, snapshot: PromptSnapshot) -> None:
        """Keep what a sequence's restoring slice will take; `release` lets go of it."""
        self._snapshots[seq_id] = snapshot

    @torch.inference_mode()
    def run_slice(self, part: PrefillSlice, sequences: Mapping[int, Sequence]) -> Tensor | None:
        """Run one prefill slice, or restore the prompt that it stands for.

        Returns:
            The logits `[vocab_size]`, float32, that the first token is sampled from, after the
            last slice; None before.
        """
        sequence = sequences[part.seq_id]
        if part.is_first:
            self._manager.reserve(part.seq_id)
        if part.is_restore:
            return self._restore(part, sequence)
        if part.is_first:
            self._cursors[part.seq_id] = PrefillCursor(
                sequence, self._spec, self._decoder, self._backend, self._manager
            )
        cursor = self._cursors[part.seq_id]
        cursor.run(part)
        if not part.is_last:
            return None
        self._fork(part)
        return cursor.last_logits()

    @torch.inference_mode()
    def prompt_logprobs(
        self, seq_id: int, start: int, end: int, num_top: int = 0
    ) -> list[RawLogprobs]:
        """Return what the model thought of the tokens `[start, end)` of a prompt that was read."""
        return self._cursors[seq_id].logprobs(start, end, num_top)

    @torch.inference_mode()
    def snapshot(self, seq_id: int) -> PromptSnapshot:
        """Copy what reading a prompt gave; before `take_report`."""
        return self._finished(seq_id).snapshot()

    def take_report(self, seq_id: int) -> CompressionReport:
        """Return the report of a prompt that was just read, and let go of its hidden states."""
        report = self._finished(seq_id).report()
        self._let_go(seq_id)
        return report

    @torch.inference_mode()
    def run_batch(self, batch: DecodeBatch, sequences: Mapping[int, Sequence]) -> Tensor:
        """Run one decode step.

        Returns:
            Logits `[len(batch.seq_ids), vocab_size]`, float32.
        """
        rows = [sequences[seq_id] for seq_id in batch.seq_ids]
        num_padding = -len(rows) % self._decode_row_multiple
        last_ids = [row.output_ids[-1] for row in rows] + [0] * num_padding
        positions = [row.num_tokens - 1 for row in rows] + [0] * num_padding
        device = self._decoder.device
        hidden = self._decoder.embed(torch.tensor(last_ids, device=device)[:, None])
        rotation = self._decoder.rotate(hidden, torch.tensor(positions, device=device)[:, None])
        context = _DecodeContext(batch.seq_ids, self._manager, self._backend)
        context.num_positions = max(positions) + 1
        for layer_idx in range(self._decoder.num_layers):
            hidden = self._decoder.run_layer(layer_idx, hidden, rotation, context)
        return self._decoder.logits(hidden[:, 0])[: len(rows)]

    @torch.inference_mode()
    def sample(self, logits: Tensor, sequences: SequenceOf[Sequence], sampled: Sampled) -> None:
        """Choose the next token of each sequence.

        Args:
            logits: One row per sequence, `[len(sequences), vocab_size]`.
            sequences: The sequences.
            sampled: Takes their tokens and failures.
        """
        for row, sequence in zip(logits, sequences, strict=True):
            seq_id = sequence.seq_id
            try:
                sampled.tokens[seq_id] = self._next_token(row, sequence)
            except InvalidParameterError as error:
                sampled.failures[seq_id] = StepFailure(error.reason, error.field)
            except ValueError as error:
                sampled.failures[seq_id] = StepFailure(str(error))
            else:
                if (num_top := sequence.sampling.logprobs) is not None:
                    token = row.new_tensor([sampled.tokens[seq_id]], dtype=torch.long)
                    (sampled.logprobs[seq_id],) = raw_logprobs(row[None], token, num_top)

    def wait_for_device(self) -> None:
        """Return when everything that was started has ended."""
        if self._decoder.device.type == "cuda":
            torch.cuda.synchronize(self._decoder.device)

    @torch.inference_mode()
    def release(self, seq_id: int) -> None:
        """Free everything held for a sequence; unknown ids are fine."""
        self._let_go(seq_id)
        self._manager.free(seq_id)

    def _next_token(self, logits: Tensor, sequence: Sequence) -> int:
        token_id = sample_token(
            shaped(logits, sequence),
            sequence.sampling,
            choice_index=sequence.choice_index,
            token_index=len(sequence.output_ids),
        )
        if sequence.constraint is not None:
            sequence.constraint.accept(token_id)
        return token_id

    def _restore(self, part: PrefillSlice, sequence: Sequence) -> Tensor:
        prompt = RestoredPrompt(
            sequence, self._snapshots.pop(part.seq_id), self._decoder, self._manager
        )
        self._restored[part.seq_id] = prompt
        self._fork(part)
        return prompt.last_logits()

    def _fork(self, part: PrefillSlice) -> None:
        for sibling_id in part.sibling_ids:
            self._manager.fork(part.seq_id, sibling_id)

    def _finished(self, seq_id: int) -> PrefillCursor | RestoredPrompt:
        return self._restored.get(seq_id) or self._cursors[seq_id]

    def _let_go(self, seq_id: int) -> None:
        for held in (self._cursors, self._snapshots, self._restored):
            held.pop(seq_id, None)
