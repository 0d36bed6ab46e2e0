"""The demo model's tokens against transformers' own tokenizer, which shares no code with ours."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
from transformers import AutoTokenizer

from snapkv_core import ChatMessage, EngineConfig, TokenizeRequest, ensure_demo_model
from snapkv_core.engine.text_coder import TextCoder
from snapkv_core.models.tokenizer import HFTokenizer
from tests.support.essays import cache_dir, load_essays
from tests.unit.core.test_text_coder import spec_of

pytestmark = [pytest.mark.demo]

TEXTS = {
    "empty": "",
    "english": "The capital of France is",
    "blanks": "  two  blanks, a\ttab\r\nand lines\n\n\n",
    "special": "<|im_start|>user\nspecial tokens in a text<|im_end|>",
    "characters": "na\u00efve e\u0301 \u65e5\u672c\u8a9e \U0001f600\U0001f468\u200d\U0001f469 \0 z",
    "code": "for i in range(10):\n    print(i ** 2)  # 2024",
    "essays": load_essays()[:26_000],
}
CHAT = (ChatMessage("system", "Be brief."), ChatMessage("user", "What is \u00fc?"))


@cache
def reference() -> Any:
    """Load the tokenizer as transformers does."""
    return AutoTokenizer.from_pretrained(ensure_demo_model(str(cache_dir())))


@pytest.fixture(scope="module")
def coder() -> Iterator[TextCoder]:
    """Give the service's way to the same tokenizer."""
    with ThreadPoolExecutor(2) as threads:
        tokenizer = HFTokenizer(reference())
        spec = spec_of(vocab_size=len(reference()), max_model_len=8_192)
        yield TextCoder(tokenizer, spec, EngineConfig(), threads)


@pytest.mark.parametrize("text", [pytest.param(text, id=name) for name, text in TEXTS.items()])
async def test_tokens_strings_and_offsets_are_those_of_transformers(
    coder: TextCoder, text: str
) -> None:
    found = await coder.tokenize(TokenizeRequest(text, with_token_strs=True, with_offsets=True))
    expected = reference()(text, return_offsets_mapping=True)
    assert list(found.token_ids) == expected["input_ids"]
    assert found.offsets == tuple(map(tuple, expected["offset_mapping"]))
    assert list(found.token_strs or ()) == reference().convert_ids_to_tokens(expected["input_ids"])
    assert found.token_ids == (await coder.tokenize(TokenizeRequest(text))).token_ids


@pytest.mark.parametrize("text", [pytest.param(text, id=name) for name, text in TEXTS.items()])
async def test_pieces_cover_the_text_and_tokens_of_one_character_share_it(
    coder: TextCoder, text: str
) -> None:
    """Nothing of this tokenizer's texts is left out, and every piece is made of whole characters.

    Bytes that stand alone are part of the character in which their token lies.
    """
    found = await coder.tokenize(TokenizeRequest(text, with_offsets=True))
    covered = 0
    for token_id, (start, end) in zip(found.token_ids, found.offsets or (), strict=True):
        assert start <= covered <= end
        assert start < end
        alone = reference().decode([token_id])
        if "\ufffd" not in alone:
            assert text[start:end] == alone
        covered = max(covered, end)
    assert covered == len(text)


@pytest.mark.parametrize("text", [pytest.param(text, id=name) for name, text in TEXTS.items()])
async def test_tokens_become_the_text_again(coder: TextCoder, text: str) -> None:
    ids = (await coder.tokenize(TokenizeRequest(text))).token_ids
    assert await coder.detokenize(ids) == text == reference().decode(ids)


@pytest.mark.parametrize("adds_prompt", [True, False])
async def test_messages_are_rendered_as_transformers_renders_them(
    coder: TextCoder, adds_prompt: bool
) -> None:
    request = TokenizeRequest(CHAT, add_generation_prompt=adds_prompt, with_offsets=True)
    found = await coder.tokenize(request)
    turns = [{"role": message.role, "content": message.content} for message in CHAT]
    given = {"add_generation_prompt": adds_prompt}
    assert found.text == reference().apply_chat_template(turns, tokenize=False, **given)
    expected = reference().apply_chat_template(turns, return_dict=False, **given)
    assert list(found.token_ids) == expected
