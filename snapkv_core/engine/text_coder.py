"""Texts to tokens and back for whoever asks, off the event loop and within bounds."""

import asyncio
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Final, TypeVar

from snapkv_core.config import EngineConfig
from snapkv_core.errors import (
    DeadlineExceededError,
    EngineStoppedError,
    InvalidParameterError,
    PromptTooLongError,
    QueueFullError,
)
from snapkv_core.events import TokenizedText, TokenizeRequest
from snapkv_core.models.spec import ModelSpec
from snapkv_core.models.tokenizer import Tokenizer

#: A text takes milliseconds, so a full queue is short soon.
_RETRY_AFTER_S: Final = 1.0

_T = TypeVar("_T")


class TextCoder:
    """Tokenises and detokenises on given threads; its methods may run on any event loop.

    No more than `max_num_waiting` texts wait at once, since requests to generate need the same
    threads.
    """

    def __init__(
        self, tokenizer: Tokenizer, spec: ModelSpec, config: EngineConfig, threads: Executor
    ) -> None:
        self._tokenizer = tokenizer
        self._spec = spec
        self._config = config
        self._threads = threads
        self._count_lock = threading.Lock()
        self._num_waiting = 0  # under the lock

    async def tokenize(self, request: TokenizeRequest) -> TokenizedText:
        """Return the tokens of a text, which may be more than the model's context holds.

        Raises:
            InvalidParameterError: The chat template refuses the messages, or the tokenizer cannot
                tell the characters.
            PromptTooLongError: The text exceeds the context by its length alone; nobody counted.
            QueueFullError: Too many texts wait.
            DeadlineExceededError: Its time was up.
            EngineStoppedError: The engine was stopped.
        """
        return await self._run(lambda: self._tokenized(request), request.timeout_s)

    async def detokenize(self, token_ids: Sequence[int], timeout_s: float | None = None) -> str:
        """Return the text of tokens, special ones included.

        Raises:
            InvalidParameterError: One of them is none of the model's.
            PromptTooLongError: There are more than its context holds.
            QueueFullError: Too many texts wait.
            DeadlineExceededError: Its time was up.
            EngineStoppedError: The engine was stopped.
        """
        return await self._run(lambda: self._detokenized(token_ids), timeout_s)

    def _tokenized(self, request: TokenizeRequest) -> TokenizedText:
        if isinstance(request.prompt, str):
            text, adds_special_tokens = request.prompt, True
            self._require_short("prompt", self._tokenizer.fewest_tokens(text), is_counted=False)
        else:
            text, adds_special_tokens = self._rendered(request), False
            self._require_short("messages", self._tokenizer.fewest_tokens(text), is_counted=False)
        if request.add_special_tokens is not None:
            adds_special_tokens = request.add_special_tokens
        offsets = None
        if request.with_offsets:
            token_ids, found = self._tokenizer.encode_with_offsets(
                text, add_special_tokens=adds_special_tokens
            )
            offsets = tuple(found)
        else:
            token_ids = self._tokenizer.encode(text, add_special_tokens=adds_special_tokens)
        strings = tuple(self._tokenizer.token_strs(token_ids)) if request.with_token_strs else None
        return TokenizedText(text, tuple(token_ids), strings, offsets)

    def _rendered(self, request: TokenizeRequest) -> str:
        assert not isinstance(request.prompt, str), "texts are not rendered"
        return self._tokenizer.render_chat(
            request.prompt, add_generation_prompt=request.add_generation_prompt
        )

    def _detokenized(self, token_ids: Sequence[int]) -> str:
        self._require_short("tokens", len(token_ids), is_counted=True)
        if not all(0 <= token_id < self._spec.vocab_size for token_id in token_ids):
            raise InvalidParameterError(
                "tokens", f"token ids run from 0 to {self._spec.vocab_size - 1}"
            )
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def _require_short(self, field: str, num_tokens: int, *, is_counted: bool) -> None:
        if num_tokens > self._spec.max_model_len:
            raise PromptTooLongError(
                field,
                num_prompt_tokens=num_tokens,
                max_new_tokens=0,
                max_model_len=self._spec.max_model_len,
                is_counted=is_counted,
            )

    async def _run(self, call: Callable[[], _T], timeout_s: float | None) -> _T:
        with self._count_lock:
            if self._num_waiting >= self._config.max_num_waiting:
                raise QueueFullError(self._num_waiting, _RETRY_AFTER_S)
            self._num_waiting += 1
        try:
            running = self._threads.submit(call)
        except RuntimeError as error:  # its threads take no more work
            self._forget()
            raise EngineStoppedError("the engine is stopped and takes no requests") from error
        # A thread that has begun goes on, whoever has left, and takes its place until then.
        running.add_done_callback(self._forget)
        try:
            async with asyncio.timeout(min(timeout_s or math.inf, self._config.request_timeout_s)):
                return await asyncio.wrap_future(running)
        except TimeoutError as error:
            raise DeadlineExceededError(
                "the request's time was up before its text was read"
            ) from error
        finally:
            running.cancel()

    def _forget(self, _: object = None) -> None:
        with self._count_lock:
            self._num_waiting -= 1
