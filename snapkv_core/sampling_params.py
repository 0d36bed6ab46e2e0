"""Frozen, validated sampling parameters of one request."""

import math
from dataclasses import dataclass
from typing import Final

from snapkv_core.errors import InvalidParameterError
from snapkv_core.validation import require_int, require_number

MAX_CHOICES: Final = 16
MAX_STOP_STRINGS: Final = 16
MAX_STOP_CHARS: Final = 1_024
MAX_SEED: Final = 2**63 - 1
MAX_TOP_LOGPROBS: Final = 20
MAX_BIASED_TOKENS: Final = 1_024
MAX_BIAS: Final = 100.0
MAX_PENALTY: Final = 2.0


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of an answer are chosen and when it ends.

    Attributes:
        max_new_tokens: Longest answer in tokens; None takes the engine's default, cut to what
            the context still holds.
        temperature: 0 is greedy; noise grows with it.
        top_p: Smallest set of tokens whose probabilities reach this is sampled from.
        top_k: Only this many of the likeliest tokens compete; 0 turns the limit off.
        seed: Same seed, same answer; None draws one per request.
        n: Answers to generate from one prefill.
        stop: Strings that end the answer; none of them appears in it.
        ignore_eos: Go on after an end-of-sequence token, for load tests.
        presence_penalty: Taken from the logits of tokens that the answer has already.
        frequency_penalty: Taken from a token's logit once for each time the answer has it.
        logit_bias: Token ids and what is added to their logits, each id once.
        logprobs: How many of the likeliest tokens each of the answer's tokens is reported with,
            beside its own log-probability; None reports nothing. They are the model's own,
            before bias, penalties, temperature and JSON schema.
        json_schema: JSON text of a schema that the answer must match; None leaves it free.

    Raises:
        InvalidParameterError: A value is out of its range; names the field.
    """

    max_new_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    json_schema: str | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None:
            require_int("max_new_tokens", self.max_new_tokens, 1, 1_048_576)
        if self.seed is not None:
            require_int("seed", self.seed, 0, MAX_SEED)
        require_int("top_k", self.top_k, 0, 1_048_576)
        require_int("n", self.n, 1, MAX_CHOICES)
        require_number("temperature", self.temperature, low=0.0, high=100.0)
        require_number("top_p", self.top_p, low=0.0, high=1.0)
        if self.top_p == 0.0:
            raise InvalidParameterError("top_p", "must be greater than 0")
        for name in ("presence_penalty", "frequency_penalty"):
            require_number(name, getattr(self, name), low=-MAX_PENALTY, high=MAX_PENALTY)
        if self.logprobs is not None:
            require_int("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)
        self._check_stop()
        self._check_bias()
        if self.json_schema is not None:
            for name, is_given in (("stop", self.stop), ("ignore_eos", self.ignore_eos)):
                if is_given:
                    raise InvalidParameterError(
                        name, "cannot be used with json_schema, which says itself where it ends"
                    )

    @property
    def changes_logits(self) -> bool:
        """Whether the model's logits are changed before a token is chosen."""
        return bool(self.logit_bias or self.presence_penalty or self.frequency_penalty)

    def _check_stop(self) -> None:
        if isinstance(self.stop, str):
            raise InvalidParameterError("stop", "must be a tuple of strings, not one string")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidParameterError(
                "stop", f"at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}"
            )
        for text in self.stop:
            if not 1 <= len(text) <= MAX_STOP_CHARS:
                raise InvalidParameterError(
                    "stop", f"each string has 1 to {MAX_STOP_CHARS} characters, got {len(text)}"
                )

    def _check_bias(self) -> None:
        if len(self.logit_bias) > MAX_BIASED_TOKENS:
            raise InvalidParameterError(
                "logit_bias", f"at most {MAX_BIASED_TOKENS} tokens, got {len(self.logit_bias)}"
            )
        for token_id, bias in self.logit_bias:
            if not (math.isfinite(bias) and -MAX_BIAS <= bias <= MAX_BIAS):
                raise InvalidParameterError(
                    "logit_bias",
                    f"the bias of token {token_id} must be from {-MAX_BIAS:g} to {MAX_BIAS:g}",
                )
        if len({token_id for token_id, _ in self.logit_bias}) < len(self.logit_bias):
            raise InvalidParameterError("logit_bias", "names a token twice")
