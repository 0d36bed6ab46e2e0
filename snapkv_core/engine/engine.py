"""The synchronous engine: add, abort, step. One thread at a time may use it."""

import logging
import time
from typing import Any, Final

from torch import Tensor

from snapkv_core.config import CompressionConfig, EngineConfig
from snapkv_core.engine.admission import RequestPreparer
from snapkv_core.engine.finding import NOT_LOOKED_UP, Finding
from snapkv_core.engine.model_runner import Sampled, failure_of
from snapkv_core.engine.observing import tell
from snapkv_core.engine.parts import build_parts
from snapkv_core.engine.request_state import RequestState
from snapkv_core.engine.scoring import Scorer
from snapkv_core.engine.step_plan import (
    PrefillSlice,
    RawLogprobs,
    StepFailure,
    StepPlan,
    StepResult,
    step_stats,
)
from snapkv_core.errors import (
    GenerationFailedError,
    InvalidParameterError,
    KVCacheError,
    ModelLoadError,
)
from snapkv_core.events import (
    EngineObserver,
    GenerationRequest,
    RequestOutput,
    TokenEvent,
)
from snapkv_core.models.loader import LoadedModel, load_model, prepare_model
from snapkv_core.models.tokenizer import Tokenizer
from snapkv_core.sampling_params import SamplingParams
from snapkv_core.sequence import FinishReason, Sequence

_OVERDUE: Final = "the request's time was up before its answer was complete"

_logger = logging.getLogger(__name__)


class Engine:
    """Runs requests step by step on one device.

    Not thread-safe, but for `prepare`. `AsyncEngine` puts it on a thread of its own.

    Attributes:
        config: What it was built from.
        spec: Shape and limits of the model.
        tokenizer: The model's tokenizer.
        observer: Told of compressed prompts, finished requests and steps.
        parts: Memory, model runner and scheduler, for whoever measures them.
    """

    def __init__(
        self, model: LoadedModel, config: EngineConfig, observer: EngineObserver | None = None
    ) -> None:
        self.config = config
        self.spec = model.spec
        self.tokenizer: Tokenizer = model.tokenizer
        self.observer = observer
        self.device, self.dtype = model.decoder.device, model.decoder.dtype
        self.parts = build_parts(model, config)
        self._runner, self._scheduler = self.parts.runner, self.parts.scheduler
        self._preparer = RequestPreparer(config, model.spec, model.tokenizer, self.parts.ledger)
        self._scorer = Scorer(self.parts, self.prepare)
        self._requests: dict[str, RequestState] = {}
        self._sequences: dict[int, Sequence] = {}

    @classmethod
    def load(cls, config: EngineConfig, observer: EngineObserver | None = None) -> "Engine":
        """Load what `config.model` names and warm up.

        Raises:
            ModelLoadError: The model cannot be served.
        """
        engine = cls(load_model(config), config)
        try:
            engine.warm_up()
        except GenerationFailedError as error:
            raise ModelLoadError(f"the model was loaded, but cannot generate: {error}") from error
        engine.observer = observer
        return engine

    @classmethod
    def from_transformers(
        cls, model: Any, tokenizer: Any, config: EngineConfig | None = None
    ) -> "Engine":
        """Build an engine around a transformers model that is loaded already.

        Raises:
            ModelLoadError: The model cannot be served.
        """
        config = config or EngineConfig()
        return cls(prepare_model(model, tokenizer, config), config)

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return self._scheduler.has_work

    @property
    def num_waiting(self) -> int:
        """Requests that have not been started."""
        return self._scheduler.num_waiting

    @property
    def num_running(self) -> int:
        """Sequences being read or generated."""
        return self._scheduler.num_running

    @property
    def kv_bytes(self) -> int:
        """Bytes of the pages that hold KV."""
        return self.parts.manager.num_pages_used * self.parts.layout.page_bytes

    def max_concurrent(self, compression: CompressionConfig, max_new_tokens: int) -> int:
        """Return how many sequences of a budget fit at once, compressed to their capacity."""
        layout, longest = self.parts.layout, self.spec.max_model_len - max_new_tokens
        num_tokens = compression.num_kept(longest) + max_new_tokens
        num_pages = layout.num_page_rows * layout.pages_for(num_tokens)
        return min(self.config.max_num_seqs, self.parts.manager.num_pages_total // num_pages)

    def warm_up(self) -> None:
        """Run a short compressed request, so that the first real one pays for no set-up."""
        num_new = min(2, self.config.max_new_tokens_limit, self.spec.max_model_len - 1)
        length = min(48, self.spec.max_model_len - num_new)
        compression = CompressionConfig(
            max_capacity_prompt=max(2, length // 2), window_size=1, kernel_size=1
        )
        prompt = tuple(index % self.spec.vocab_size for index in range(1, length + 1))
        sampling = SamplingParams(max_new_tokens=num_new, ignore_eos=True)
        self.generate(GenerationRequest("warm-up", prompt, sampling, compression))

    def prepare(
        self, request: GenerationRequest, arrival_s: float | None = None
    ) -> tuple[Sequence, ...]:
        """Tokenise and check a request; any thread may call this.

        Args:
            request: The request.
            arrival_s: When it was submitted, `time.monotonic()`, from which its time counts; None
                takes this moment.

        Raises:
            InvalidParameterError: A parameter does not fit this model or configuration.
            PromptTooLongError: The prompt does not fit the context.
            RequestTooLargeError: Its KV cache exceeds all memory there is for it.
        """
        return self._preparer.prepare(request, arrival_s)

    def add(
        self,
        request: GenerationRequest,
        group: tuple[Sequence, ...],
        finding: Finding = NOT_LOOKED_UP,
    ) -> None:
        """Queue a prepared request.

        Args:
            request: The request.
            group: What `prepare` made of it.
            finding: What is known of its prompt, and who waits for what reading it gives.

        Raises:
            InvalidParameterError: A request of the same id is in flight.
            QueueFullError: Too many are waiting.
        """
        if request.request_id in self._requests:
            raise InvalidParameterError("request_id", "a request of this id is in flight")
        for sequence in group:
            sequence.is_restored = finding.snapshot is not None
        self._scheduler.add(group)
        if finding.snapshot is not None:
            self._runner.hold_snapshot(group[0].seq_id, finding.snapshot)
        self._requests[request.request_id] = RequestState(request, group, self.tokenizer, finding)
        self._sequences.update({sequence.seq_id: sequence for sequence in group})

    def add_request(self, request: GenerationRequest) -> None:
        """Prepare and queue a request; raises what `prepare` and `add` raise."""
        self.add(request, self.prepare(request))

    def abort(self, request_id: str) -> list[TokenEvent]:
        """End a request at once and free its memory; an unknown id is fine."""
        state = self._requests.get(request_id)
        return [] if state is None else self._end(state.group, FinishReason.ABORT)

    def end_all(self, error: str) -> list[TokenEvent]:
        """End every request with an error and free its memory."""
        events = []
        for state in list(self._requests.values()):
            events += self._end(state.group, FinishReason.ERROR, StepFailure(error))
        return events

    def step(self) -> list[TokenEvent]:
        """Run one step and return what became certain in it."""
        start_s = time.monotonic()
        events = self._end_overdue(start_s)
        plan = self._scheduler.plan()
        result = self._execute(plan)
        for seq_id, failure in result.failures.items():
            events += self._end((self._sequences[seq_id],), FinishReason.ERROR, failure)
        self._scheduler.commit(plan, result)
        for seq_id, token_id in result.token_ids.items():
            found = result.logprobs.get(seq_id)
            events += self._token_events(self._sequences[seq_id], token_id, found)
        stats = step_stats(plan, result, self.spec.num_layers, time.monotonic() - start_s)
        tell(self.observer, "on_step", stats)
        return events

    def generate(self, request: GenerationRequest) -> RequestOutput:
        """Run one request to its end.

        Raises:
            InvalidParameterError: See `prepare`.
            GenerationFailedError: A step failed.
        """
        group = self.prepare(request)
        self.add(request, group)
        texts = [""] * len(group)
        try:
            while True:
                for event in self.step():
                    if event.request_id != request.request_id:
                        continue
                    texts[event.choice_index] += event.text
                    if event.error is not None:
                        raise GenerationFailedError(event.error)
                    if event.summary is not None:
                        token_ids = tuple(tuple(sequence.output_ids) for sequence in group)
                        return RequestOutput(tuple(texts), token_ids, event.summary)
        finally:
            # An interrupt or the failure of one choice leaves nothing of the others behind.
            self.abort(request.request_id)

    def score(
        self,
        prompt_ids: tuple[int, ...],
        output_ids: tuple[int, ...],
        compression: CompressionConfig,
    ) -> Tensor:
        """Teacher-force an answer on the compressed cache of a prompt; the engine must be idle.

        Returns:
            Logits `[len(output_ids), vocab_size]`, float32, that predict each of `output_ids`.

        Raises:
            InvalidParameterError: See `prepare`.
        """
        return self._scorer.score(prompt_ids, output_ids, compression)

    def prompt_logprobs(
        self, prompt_ids: tuple[int, ...], start: int = 1, end: int | None = None
    ) -> Tensor:
        """Score a prompt's own tokens; the engine must be idle.

        Args:
            prompt_ids: The prompt.
            start: First token to score, at least 1: the first has nothing before it.
            end: Token after the last; None scores to the end.

        Returns:
            Log-probability of each token `[start, end)` given those before it, float32.

        Raises:
            InvalidParameterError: The range lies outside the prompt; and see `prepare`.
        """
        end = len(prompt_ids) if end is None else end
        return self._scorer.prompt_logprobs(prompt_ids, start, end)

    def check_integrity(self) -> None:
        """Check the invariants of KV store, ledger and scheduler; raises `KVCacheError`."""
        self.parts.manager.check_integrity()
        self._scheduler.check_integrity()
        if self.parts.manager.num_pages_used > self.parts.ledger.num_pages_reserved:
            raise KVCacheError("sequences hold more pages than were reserved for them")

    def _end_overdue(self, now_s: float) -> list[TokenEvent]:
        by_request: dict[str, list[Sequence]] = {}
        for sequence in self._scheduler.expired(now_s):
            by_request.setdefault(sequence.request_id, []).append(sequence)
        events = []
        for late in by_request.values():
            events += self._end(tuple(late), FinishReason.DEADLINE, StepFailure(_OVERDUE))
        return events

    def _execute(self, plan: StepPlan) -> StepResult:
        """Run both halves of a plan; what raises fails the sequences it touched and no others."""
        sampled = Sampled()
        start_s = time.monotonic()
        if plan.prefill:
            try:
                for part in plan.prefill:
                    self._read(part, sampled)
                # The pacer learns from times, and a GPU's work is only queued so far.
                self._runner.wait_for_device()
            except Exception as error:
                touched = plan.prefill[0].touched_ids
                _logger.exception("prefill slice failed", extra=self._naming(touched))
                sampled.fail(touched, error)
        prefill_end_s = time.monotonic()
        if plan.decode is not None:
            rows = [self._sequences[seq_id] for seq_id in plan.decode.seq_ids]
            try:
                logits = self._runner.run_batch(plan.decode, self._sequences)
                self._runner.sample(logits, rows, sampled)
            except Exception as error:
                _logger.exception("decode step failed", extra=self._naming(plan.decode.seq_ids))
                sampled.fail(plan.decode.seq_ids, error)
        # A row that was sampled before another one failed must not count as a success.
        return StepResult(
            token_ids={i: t for i, t in sampled.tokens.items() if i not in sampled.failures},
            logprobs=sampled.logprobs,
            failures=sampled.failures,
            prefill_s=prefill_end_s - start_s if plan.prefill else 0.0,
            decode_s=time.monotonic() - prefill_end_s if plan.decode else 0.0,
        )

    def _read(self, part: PrefillSlice, sampled: Sampled) -> None:
        """Run one prefill slice; the last one gives each choice its first token."""
        group = [self._sequences[seq_id] for seq_id in part.touched_ids]
        if part.is_first:
            for sequence in group:
                sequence.prefill_start_s = time.monotonic()
        logits = self._runner.run_slice(part, self._sequences)
        if logits is None:
            return
        state = self._requests[group[0].request_id]
        self._give_snapshot(state, part.seq_id)
        if group[0].wants_prompt_logprobs:
            end, num_top = group[0].num_prompt_tokens, group[0].sampling.logprobs or 0
            state.prompt_logprobs = self._runner.prompt_logprobs(part.seq_id, 1, end, num_top)
        state.report = self._runner.take_report(part.seq_id)
        tell(self.observer, "on_prompt_compressed", state.request_id, state.report)
        self._runner.sample(logits.expand(len(group), -1), group, sampled)

    def _give_snapshot(self, state: RequestState, seq_id: int) -> None:
        try:
            wanted = self._runner.snapshot(seq_id) if state.wants_snapshot else None
            state.give_snapshot(wanted)
        except Exception:
            # It saves others time; the answer does not need it.
            _logger.exception("taking a snapshot failed", extra=self._naming((seq_id,)))
            state.give_snapshot(None)

    def _token_events(
        self, sequence: Sequence, token_id: int, found: RawLogprobs | None
    ) -> list[TokenEvent]:
        state = self._requests[sequence.request_id]
        try:
            text, is_stopped = state.push(sequence, token_id)
        except Exception as error:
            # A tokenizer may raise on ids that pad its vocabulary.
            _logger.exception("decoding a token failed", extra=self._naming((sequence.seq_id,)))
            return self._end((sequence,), FinishReason.ERROR, failure_of(error))
        if is_stopped:
            self._scheduler.drop((sequence,), FinishReason.STOP)
            # A stop string that the very last token completed ends the answer as one before it.
            sequence.finish_reason = FinishReason.STOP
        event = state.event(sequence, text, (token_id,), logprobs=found)
        self._clean_up(sequence, event)
        return [event]

    def _end(
        self, group: tuple[Sequence, ...], reason: FinishReason, failure: StepFailure | None = None
    ) -> list[TokenEvent]:
        """End sequences that are still going, and tell their listeners."""
        going = tuple(sequence for sequence in group if sequence.seq_id in self._sequences)
        state = self._requests[group[0].request_id]
        self._scheduler.drop(going, reason)
        events = []
        for sequence in going:
            sequence.finish_reason = reason
            event = state.event(sequence, failure=failure)
            self._clean_up(sequence, event)
            events.append(event)
        return events

    def _clean_up(self, sequence: Sequence, event: TokenEvent) -> None:
        """Free what a finished sequence held, and forget its request after its last event."""
        if event.finish_reason is not None:
            self._runner.release(sequence.seq_id)
            del self._sequences[sequence.seq_id]
        if event.summary is not None:
            self._requests.pop(event.request_id).give_snapshot(None)
            tell(self.observer, "on_request_finished", event.summary)

    def _naming(self, seq_ids: tuple[int, ...]) -> dict[str, str]:
        """Name the requests of some sequences, for a log line about them."""
        request_ids = {self._sequences[seq_id].request_id: None for seq_id in seq_ids}
        return {"request_id": ",".join(request_ids)}
