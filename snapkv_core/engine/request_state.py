"""One request inside the engine: its sequences, their text so far, and its events."""

import time

from snapkv_core.engine.detokenizer import Detokenizer
from snapkv_core.engine.finding import Finding
from snapkv_core.engine.step_plan import RawLogprobs, StepFailure
from snapkv_core.events import (
    CompressionReport,
    GenerationRequest,
    PositionLogprobs,
    RequestSummary,
    RequestTimings,
    TokenEvent,
    TokenLogprob,
)
from snapkv_core.kv_cache.snapshot import PromptSnapshot
from snapkv_core.models.tokenizer import Tokenizer
from snapkv_core.sequence import FinishReason, Sequence, SequenceStatus


class RequestState:
    """Turns the tokens of one request into events; the engine thread owns it."""

    def __init__(
        self,
        request: GenerationRequest,
        group: tuple[Sequence, ...],
        tokenizer: Tokenizer,
        finding: Finding,
    ) -> None:
        self._snapshot_use = finding.use
        self._on_snapshot = finding.on_snapshot
        self._is_snapshot_wanted = finding.is_wanted
        self.request_id = request.request_id
        self.group = group
        self.report: CompressionReport | None = None
        self.prompt_logprobs: list[RawLogprobs] = []
        self._tokenizer = tokenizer
        self._prompt = request.prompt if request.echo else None
        self._open_choices = {sequence.choice_index for sequence in group}
        self._detokenizers = [
            Detokenizer(tokenizer.decode, sequence.prompt_ids, sequence.sampling.stop)
            for sequence in group
        ]

    @property
    def wants_snapshot(self) -> bool:
        """Whether somebody has a use for the prompt's snapshot."""
        return self._on_snapshot is not None and self._is_snapshot_wanted()

    def give_snapshot(self, snapshot: PromptSnapshot | None) -> None:
        """Hand the snapshot, or that there is none, to whoever waits for it; once."""
        take, self._on_snapshot = self._on_snapshot, None
        if take is not None:
            take(snapshot)

    def push(self, sequence: Sequence, token_id: int) -> tuple[str, bool]:
        """Take a choice's next token.

        Returns:
            The text that became certain, and whether a stop string ended the choice.
        """
        detokenizer = self._detokenizers[sequence.choice_index]
        is_first = len(sequence.output_ids) == 1
        if sequence.first_token_s is None:
            sequence.first_token_s = time.monotonic()
        # The token that ends an answer is no part of its text, whatever the tokenizer makes of it.
        text = "" if sequence.finish_reason is FinishReason.STOP else detokenizer.push(token_id)
        if sequence.status is SequenceStatus.FINISHED:
            text += detokenizer.finish()
        if is_first and self._prompt is not None:
            text = self._echoed(sequence) + text
        return text, detokenizer.is_stopped

    def event(
        self,
        sequence: Sequence,
        text: str = "",
        token_ids: tuple[int, ...] = (),
        *,
        logprobs: RawLogprobs | None = None,
        failure: StepFailure | None = None,
    ) -> TokenEvent:
        """Build a choice's event; the last one of the last choice carries the summary."""
        is_first = bool(token_ids) and len(sequence.output_ids) == 1
        # Counted by events: several choices may end in one step, and each still gets its own.
        if sequence.status is SequenceStatus.FINISHED:
            self._open_choices.discard(sequence.choice_index)
        return TokenEvent(
            request_id=self.request_id,
            choice_index=sequence.choice_index,
            text=text,
            token_ids=token_ids,
            finish_reason=sequence.finish_reason,
            summary=None if self._open_choices else self._summary(),
            error=None if failure is None else failure.reason,
            error_field=None if failure is None else failure.field,
            logprobs=() if logprobs is None else (self._position(logprobs),),
            prompt_logprobs=self._prompt_logprobs() if is_first else (),
        )

    def _echoed(self, sequence: Sequence) -> str:
        if isinstance(self._prompt, str):
            return self._prompt
        return self._tokenizer.decode(sequence.prompt_ids)

    def _prompt_logprobs(self) -> tuple[PositionLogprobs, ...]:
        leader = self.group[0]
        if not leader.wants_prompt_logprobs:
            return ()
        first = PositionLogprobs(self._named(leader.prompt_ids[0], None), ())
        return (first, *map(self._position, self.prompt_logprobs))

    def _position(self, found: RawLogprobs) -> PositionLogprobs:
        return PositionLogprobs(
            self._named(found.token_id, found.logprob),
            tuple(self._named(token_id, logprob) for token_id, logprob in found.top),
        )

    def _named(self, token_id: int, logprob: float | None) -> TokenLogprob:
        vocabulary = self._tokenizer.vocabulary()
        return TokenLogprob(
            token_id, vocabulary.bytes_of(token_id), logprob, vocabulary.is_special(token_id)
        )

    def _summary(self) -> RequestSummary:
        return RequestSummary(
            request_id=self.request_id,
            num_prompt_tokens=self.group[0].num_prompt_tokens,
            num_output_tokens=sum(len(sequence.output_ids) for sequence in self.group),
            finish_reasons=tuple(
                sequence.finish_reason or FinishReason.ABORT for sequence in self.group
            ),
            compression=self.report,
            timings=self._timings(),
            snapshot=self._snapshot_use,
        )

    def _timings(self) -> RequestTimings:
        """Times up to now; a stage that was never reached took no time."""
        end = time.monotonic()
        leader = self.group[0]
        prefill_start = leader.prefill_start_s or end
        first_token = leader.first_token_s or end
        return RequestTimings(
            queue_ms=(prefill_start - leader.arrival_s) * 1e3,
            prefill_ms=(first_token - prefill_start) * 1e3,
            decode_ms=(end - first_token) * 1e3,
            time_to_first_token_ms=(first_token - leader.arrival_s) * 1e3,
            total_ms=(end - leader.arrival_s) * 1e3,
        )
