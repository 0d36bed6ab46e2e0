"""Tokenising beside the event loop: bounds on length, time and number, and what ends it."""

import asyncio
import dataclasses
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from snapkv_core import (
    ChatMessage,
    DeadlineExceededError,
    EngineConfig,
    EngineStoppedError,
    InvalidParameterError,
    PromptTooLongError,
    QueueFullError,
    TokenizeRequest,
)
from snapkv_core.engine.text_coder import TextCoder
from snapkv_core.models.spec import ModelSpec
from snapkv_core.models.vocabulary import Vocabulary


def spec_of(vocab_size: int, max_model_len: int) -> ModelSpec:
    """Describe a model of which only this is of interest."""
    return ModelSpec(
        name="none",
        num_layers=1,
        num_q_heads=1,
        num_kv_heads=1,
        head_dim=1,
        hidden_size=1,
        intermediate_size=1,
        layer_weights=1,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=frozenset(),
    )


SPEC = spec_of(vocab_size=256, max_model_len=10)
CONFIG = EngineConfig(max_num_waiting=2, request_timeout_s=20.0)


class GatedTokenizer:
    """A character is a token; works once the test opens its gate, and tells where and on what."""

    eos_token_ids: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.threads: set[int] = set()
        self.special: list[bool] = []
        self.rendered: list[bool] = []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Take each character's number once the gate is open."""
        self.threads.add(threading.get_ident())
        self.special.append(add_special_tokens)
        assert self.gate.wait(30)
        return [ord(character) for character in text]

    def encode_with_offsets(
        self, text: str, *, add_special_tokens: bool = True
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Let each of them stand for its character."""
        ids = self.encode(text, add_special_tokens=add_special_tokens)
        return ids, [(index, index + 1) for index in range(len(ids))]

    def token_strs(self, token_ids: Any) -> list[str]:
        """Return the characters."""
        return [chr(token_id) for token_id in token_ids]

    def fewest_tokens(self, text: str) -> int:
        """Be sure of half of them."""
        return len(text) // 2

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = True) -> str:
        """Join the characters; nobody here leaves any out."""
        assert not skip_special_tokens
        return "".join(map(chr, token_ids))

    def vocabulary(self) -> Vocabulary:
        """Know no bytes; nobody here asks."""
        raise NotImplementedError

    @property
    def tool_syntax(self) -> None:
        """Know no tools."""

    def render_chat(
        self, messages: Any, tools: Any = (), *, add_generation_prompt: bool = True
    ) -> str:
        """Join the contents."""
        assert not tools
        self.rendered.append(add_generation_prompt)
        if messages[0].role == "wizard":
            raise InvalidParameterError("messages", "no such role")
        return "".join(message.content for message in messages)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    """Give one thread."""
    with ThreadPoolExecutor(1) as executor:
        yield executor


@pytest.fixture
def tokenizer() -> GatedTokenizer:
    """Give a tokenizer whose gate is open."""
    return GatedTokenizer()


@pytest.fixture
def coder(tokenizer: GatedTokenizer, threads: ThreadPoolExecutor) -> TextCoder:
    """Give a coder with room for two texts."""
    return TextCoder(tokenizer, SPEC, CONFIG, threads)


async def test_a_text_is_tokenised_on_another_thread(
    coder: TextCoder, tokenizer: GatedTokenizer
) -> None:
    found = await coder.tokenize(TokenizeRequest("abc", with_token_strs=True, with_offsets=True))
    assert found.token_ids == (97, 98, 99)
    assert found.token_strs == ("a", "b", "c")
    assert (found.text, found.offsets) == ("abc", ((0, 1), (1, 2), (2, 3)))
    assert threading.get_ident() not in tokenizer.threads
    assert await coder.detokenize([104, 105]) == "hi"


async def test_special_tokens_go_around_texts_but_not_around_templates(
    coder: TextCoder, tokenizer: GatedTokenizer
) -> None:
    """What generating does, unless the caller says otherwise."""
    messages = (ChatMessage("user", "a"),)
    for prompt in ("a", messages):
        for given in (None, False, True):
            await coder.tokenize(TokenizeRequest(prompt, add_special_tokens=given))
    await coder.tokenize(TokenizeRequest(messages, add_generation_prompt=False))
    assert tokenizer.special == [True, False, True, False, False, True, False]
    assert tokenizer.rendered == [True, True, True, False]


async def test_a_text_beyond_the_context_is_counted_unless_it_is_so_by_its_length(
    coder: TextCoder, tokenizer: GatedTokenizer
) -> None:
    assert len((await coder.tokenize(TokenizeRequest("x" * 21))).token_ids) == 21
    for prompt, field in (("x" * 22, "prompt"), ((ChatMessage("user", "x" * 22),), "messages")):
        with pytest.raises(PromptTooLongError, match="at least 11 tokens") as caught:
            await coder.tokenize(TokenizeRequest(prompt))
        assert caught.value.field == field
    assert len(tokenizer.special) == 1, "it was counted although it is too long"


@pytest.mark.parametrize("token_ids", [[-1], [1, 256]])
async def test_tokens_that_the_model_has_not_are_refused(
    coder: TextCoder, token_ids: list[int]
) -> None:
    with pytest.raises(InvalidParameterError, match="0 to 255") as caught:
        await coder.detokenize(token_ids)
    assert caught.value.field == "tokens"


async def test_more_tokens_than_the_context_holds_are_refused(coder: TextCoder) -> None:
    assert await coder.detokenize([97] * 10) == "a" * 10
    with pytest.raises(PromptTooLongError):
        await coder.detokenize([97] * 11)


async def test_no_more_than_so_many_texts_wait(coder: TextCoder, tokenizer: GatedTokenizer) -> None:
    """The places are free again when the texts are done, whatever became of who asked."""
    tokenizer.gate.clear()
    first, second = (asyncio.create_task(coder.tokenize(TokenizeRequest("a"))) for _ in range(2))
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError):
        await coder.tokenize(TokenizeRequest("b"))
    first.cancel()
    second.cancel()
    await asyncio.wait({first, second})
    tokenizer.gate.set()
    async with asyncio.timeout(20):
        found = None
        while found is None:
            try:
                found = await coder.tokenize(TokenizeRequest("b"))
            except QueueFullError:
                await asyncio.sleep(0.005)
    assert found.token_ids == (98,)


async def test_its_time_is_limited(coder: TextCoder, tokenizer: GatedTokenizer) -> None:
    tokenizer.gate.clear()
    with pytest.raises(DeadlineExceededError):
        await coder.tokenize(TokenizeRequest("a", timeout_s=0.05))
    tokenizer.gate.set()


async def test_the_engines_own_limit_holds_without_another(
    tokenizer: GatedTokenizer, threads: ThreadPoolExecutor
) -> None:
    config = dataclasses.replace(CONFIG, request_timeout_s=0.05)
    tokenizer.gate.clear()
    with pytest.raises(DeadlineExceededError):
        await TextCoder(tokenizer, SPEC, config, threads).tokenize(TokenizeRequest("a"))
    tokenizer.gate.set()


async def test_a_refusal_of_the_template_reaches_the_caller(coder: TextCoder) -> None:
    with pytest.raises(InvalidParameterError, match="no such role"):
        await coder.tokenize(TokenizeRequest((ChatMessage("wizard", "a"),)))


async def test_threads_that_were_stopped_take_no_text(
    coder: TextCoder, threads: ThreadPoolExecutor
) -> None:
    threads.shutdown()
    for _ in range(3):
        with pytest.raises(EngineStoppedError):
            await coder.tokenize(TokenizeRequest("a"))
