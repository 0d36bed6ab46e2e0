"""Holds an answer to a JSON schema: which tokens may come next."""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import lru_cache
from typing import Final

import numpy as np
from llguidance import LLMatcher, LLParserLimits

from snapkv_core.engine.answer_schema import FIELD, require_supported
from snapkv_core.errors import InvalidParameterError
from snapkv_core.models.vocabulary import Vocabulary

#: A state of the lexer takes up to 2 kB; a message must not hold the schema or the answer.
_LIMITS: Final = LLParserLimits(max_lexer_states=25_000, verbose_errors=False)
_MAX_REASON_CHARS: Final = 300
_COMPILE_TIMEOUT_S: Final = 5.0
#: Callers send the same schema again and again.
_MAX_COMPILED: Final = 32

_logger = logging.getLogger(__name__)


class JSONConstraint:
    """Where one answer is in its schema. The engine's thread uses it, once it was made."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def copy(self) -> "JSONConstraint":
        """Return another one at the same place."""
        return JSONConstraint(self._matcher.deep_copy())

    def allowed(self) -> bytes:
        """Return a byte per token of the vocabulary, 0 for those that must not come next.

        Raises:
            InvalidParameterError: No token may, or the schema is too complex to tell.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            _logger.info("a JSON schema failed: %s", self._reason())
            raise InvalidParameterError(FIELD, "is too complex at this point of the answer")
        if not bits.any():
            raise InvalidParameterError(FIELD, "allows nothing at this point of the answer")
        return np.unpackbits(bits, bitorder="little").tobytes()

    def accept(self, token_id: int) -> None:
        """Go on behind a token that was allowed."""
        self._matcher.consume_token(token_id)

    def _reason(self) -> str:
        return " ".join(self._matcher.get_error().split())[:_MAX_REASON_CHARS]


class SchemaCompiler:
    """Makes constraints of JSON schemas; any thread may call it, not the engine's."""

    def __init__(
        self, vocabulary: Callable[[], Vocabulary], timeout_s: float = _COMPILE_TIMEOUT_S
    ) -> None:
        """Compile for a vocabulary, which is asked for when it is needed.

        Args:
            vocabulary: Returns it.
            timeout_s: Longest time that a schema may take.
        """
        self._vocabulary = vocabulary
        self._timeout_s = timeout_s
        self._compile = lru_cache(_MAX_COMPILED)(self._compile_in_time)
        # What takes too long cannot be stopped: it ends on a thread where nobody waits for it, and
        # two of them at most take turns with the engine.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="snapkv-schema")

    def compile(self, schema_json: str) -> JSONConstraint:
        """Return the constraint at its beginning, to be copied; may block for seconds.

        Raises:
            InvalidParameterError: The schema cannot be met, is not supported, or takes too long.
        """
        return self._compile(schema_json)

    def _compile_in_time(self, schema_json: str) -> JSONConstraint:
        require_supported(schema_json)
        vocabulary = self._vocabulary()
        if not vocabulary.ends_answers:
            raise InvalidParameterError(FIELD, "this model has no token that ends an answer")
        compiling = self._threads.submit(_compile, schema_json, vocabulary)
        try:
            return compiling.result(self._timeout_s)
        except FutureTimeoutError:
            compiling.cancel()
            raise InvalidParameterError(
                FIELD, f"takes more than {self._timeout_s:g} s to compile; make it simpler"
            ) from None


def _compile(schema_json: str, vocabulary: Vocabulary) -> JSONConstraint:
    reason = None
    try:
        grammar = LLMatcher.grammar_from_json_schema(
            schema_json,
            overrides={
                # Blanks only where people put them: a small model would go on with blanks until
                # its answer is full.
                "item_separator": ", ",
                "key_separator": ": ",
                "whitespace_flexible": False,
                # Either would accept answers that the schema refuses.
                "coerce_one_of": False,
                "lenient": False,
            },
        )
        matcher = LLMatcher(vocabulary.trie, grammar, log_level=0, limits=_LIMITS)
        reason = matcher.get_error()
    except ValueError as error:
        reason = str(error)
    if reason:
        text = " ".join(reason.split())[:_MAX_REASON_CHARS]
        raise InvalidParameterError(FIELD, f"cannot be used: {text}")
    constraint = JSONConstraint(matcher)
    constraint.copy().allowed()  # one that allows nothing from the start is refused here
    return constraint
