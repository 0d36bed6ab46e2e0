"""Frozen, validated sampling parameters of one request."""

from dataclasses import dataclass
from typing import Final

from snapkv_core.errors import InvalidParameterError
from snapkv_core.validation import require_int, require_number

MAX_CHOICES: Final = 16
MAX_STOP_STRINGS: Final = 16
MAX_STOP_CHARS: Final = 1_024
MAX_SEED: Final = 2**63 - 1


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
