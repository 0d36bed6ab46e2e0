"""From a request to sequences: tokens, limits and defaults, before anything is queued."""

import itertools
import math
import secrets
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Final, cast

from snapkv_core.config import EngineConfig
from snapkv_core.engine.constraint import SchemaCompiler
from snapkv_core.engine.memory_ledger import MemoryLedger
from snapkv_core.errors import InvalidParameterError, PromptTooLongError
from snapkv_core.events import ChatMessage, GenerationRequest, RequestSize
from snapkv_core.models.spec import ModelSpec
from snapkv_core.models.tokenizer import Tokenizer
from snapkv_core.sampling_params import SamplingParams
from snapkv_core.sequence import Sequence, TokenConstraint

#: The head runs on them in one step, while everybody else waits.
MAX_ECHO_LOGPROBS_TOKENS: Final = 2_048


def size_of(group: tuple[Sequence, ...]) -> RequestSize:
    """Return the size of a request, given its sequences."""
    leader = group[0]
    return RequestSize(leader.num_prompt_tokens, leader.max_new_tokens, len(group))


class RequestPreparer:
    """Checks a request against the model and the configuration; any thread may call it."""

    def __init__(
        self, config: EngineConfig, spec: ModelSpec, tokenizer: Tokenizer, ledger: MemoryLedger
    ) -> None:
        self._config = config
        self._spec = spec
        self._tokenizer = tokenizer
        self._ledger = ledger
        self._compiler = SchemaCompiler(tokenizer.vocabulary)
        self._seq_ids: Iterator[int] = itertools.count(1)

    def prepare(
        self, request: GenerationRequest, arrival_s: float | None = None
    ) -> tuple[Sequence, ...]:
        """Turn a request into its `n` sequences.

        Args:
            request: The request.
            arrival_s: When it was submitted, `time.monotonic()`; None takes this moment.

        Raises:
            InvalidParameterError: A parameter does not fit this model or configuration.
            PromptTooLongError: The prompt does not fit the context.
            RequestTooLargeError: Its KV cache exceeds all memory there is for it.
        """
        if arrival_s is None:
            arrival_s = time.monotonic()
        is_chat = any(isinstance(part, ChatMessage) for part in request.prompt[:1])
        field = "messages" if is_chat else "prompt"
        prompt_ids = self._encode(request, field)
        if request.sampling.n > self._config.max_num_seqs:
            raise InvalidParameterError(
                "n", f"at most {self._config.max_num_seqs} here, got {request.sampling.n}"
            )
        sampling = replace(
            request.sampling,
            max_new_tokens=self._max_new_tokens(request, len(prompt_ids), field),
            seed=secrets.randbits(63) if request.sampling.seed is None else request.sampling.seed,
        )
        wants_prompt_logprobs = self._require_reportable(request, len(prompt_ids))
        constraints = self._constraints(sampling)
        timeout_s = min(request.timeout_s or math.inf, self._config.request_timeout_s)
        group = tuple(
            Sequence(
                seq_id=next(self._seq_ids),
                request_id=request.request_id,
                prompt_ids=prompt_ids,
                sampling=sampling,
                compression=request.compression,
                arrival_s=arrival_s,
                deadline_s=arrival_s + timeout_s,
                choice_index=choice_index,
                tenant=request.tenant,
                explain=request.explain,
                wants_prompt_logprobs=wants_prompt_logprobs,
                constraint=constraint,
            )
            for choice_index, constraint in enumerate(constraints)
        )
        is_compressed = request.compression.compresses(len(prompt_ids))
        self._ledger.require_possible(group, "max_capacity_prompt" if is_compressed else field)
        return group

    def _require_reportable(self, request: GenerationRequest, num_prompt_tokens: int) -> bool:
        """Check what a request wants to be told; returns whether the prompt's tokens are in it."""
        sampling = request.sampling
        too_high = [token_id for token_id, _ in sampling.logit_bias if not self._is_token(token_id)]
        if too_high:
            raise InvalidParameterError(
                "logit_bias",
                f"token ids run from 0 to {self._spec.vocab_size - 1}, got {too_high[0]}",
            )
        if sampling.logprobs is None:
            return False
        self._tokenizer.vocabulary()  # made here, since the engine's thread has no time for it
        if request.echo and num_prompt_tokens > MAX_ECHO_LOGPROBS_TOKENS:
            raise InvalidParameterError(
                "echo",
                f"with logprobs it takes prompts of at most {MAX_ECHO_LOGPROBS_TOKENS} tokens, got "
                f"{num_prompt_tokens}",
            )
        return request.echo

    def _constraints(self, sampling: SamplingParams) -> tuple[TokenConstraint | None, ...]:
        """Return what each choice is held to."""
        if sampling.json_schema is None:
            return (None,) * sampling.n
        constraint = self._compiler.compile(sampling.json_schema)
        return tuple(constraint.copy() for _ in range(sampling.n))

    def _is_token(self, token_id: int) -> bool:
        return 0 <= token_id < self._spec.vocab_size

    def _encode(self, request: GenerationRequest, field: str) -> tuple[int, ...]:
        if isinstance(request.prompt, str):
            self._require_short(request.prompt, request, field)
            prompt_ids = tuple(self._tokenizer.encode(request.prompt))
        elif field == "messages":
            messages = cast(tuple[ChatMessage, ...], request.prompt)
            text = self._tokenizer.render_chat(messages, request.tools)
            self._require_short(text, request, field)
            # The template writes the special tokens itself.
            prompt_ids = tuple(self._tokenizer.encode(text, add_special_tokens=False))
        else:
            prompt_ids = cast(tuple[int, ...], request.prompt)
            if not all(map(self._is_token, prompt_ids)):
                raise InvalidParameterError(
                    field, f"token ids run from 0 to {self._spec.vocab_size - 1}"
                )
        if not prompt_ids:
            raise InvalidParameterError(field, "must hold at least one token")
        return prompt_ids

    def _require_short(self, text: str, request: GenerationRequest, field: str) -> None:
        """Refuse a text that is too long by far; counting megabytes takes seconds and gigabytes."""
        num_tokens = self._tokenizer.fewest_tokens(text)
        if num_tokens > self._spec.max_model_len:
            raise PromptTooLongError(
                field,
                num_prompt_tokens=num_tokens,
                max_new_tokens=request.sampling.max_new_tokens or 1,
                max_model_len=self._spec.max_model_len,
                is_counted=False,
            )

    def _max_new_tokens(
        self, request: GenerationRequest, num_prompt_tokens: int, field: str
    ) -> int:
        wanted = request.sampling.max_new_tokens
        if wanted is not None and wanted > self._config.max_new_tokens_limit:
            raise InvalidParameterError(
                "max_new_tokens",
                f"must be at most {self._config.max_new_tokens_limit}, this server's ceiling, "
                f"got {wanted}",
            )
        room = self._spec.max_model_len - num_prompt_tokens
        # An answer length that was not asked for shrinks to what is left; one that was does not.
        needed = 1 if wanted is None else wanted
        if room < needed:
            raise PromptTooLongError(
                field,
                num_prompt_tokens=num_prompt_tokens,
                max_new_tokens=needed,
                max_model_len=self._spec.max_model_len,
            )
        if wanted is not None:
            return wanted
        default = self._config.default_max_new_tokens
        return min(default, room, request.max_default_new_tokens or default)
