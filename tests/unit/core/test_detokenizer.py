"""Pieces of text are whole characters, join to the whole text and end before a stop string."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snapkv_core.engine.detokenizer import Detokenizer

_TEXT = st.text(alphabet="aab \n.日本é🎉👩‍👧", max_size=30)


class Pieces:
    """A tokenizer whose token i is the i-th piece of some bytes."""

    def __init__(self, raw: bytes, cuts: Sequence[int]) -> None:
        borders = [0, *sorted(cut % (len(raw) + 1) for cut in cuts), len(raw)]
        pairs = itertools.pairwise(borders)
        self.pieces = [raw[start:end] for start, end in pairs]

    def decode(self, ids: Sequence[int]) -> str:
        """Join pieces and read them as UTF-8, as byte-level tokenizers do."""
        return b"".join(self.pieces[i] for i in ids).decode(errors="replace")


def push_all(tokenizer: Pieces, stop: tuple[str, ...] = (), num_prompt: int = 0) -> list[str]:
    """Push every piece behind the prompt, then finish."""
    ids = range(len(tokenizer.pieces))
    detokenizer = Detokenizer(tokenizer.decode, ids[:num_prompt], stop)
    return [*(detokenizer.push(i) for i in ids[num_prompt:]), detokenizer.finish()]


@given(_TEXT, st.lists(st.integers(0, 200), max_size=60))
@settings(max_examples=200, deadline=None)
def test_pieces_are_whole_characters_and_join_to_the_text(text: str, cuts: list[int]) -> None:
    chunks = push_all(Pieces(text.encode(), cuts))
    assert "".join(chunks) == text
    assert all("\ufffd" not in chunk for chunk in chunks)


@given(_TEXT, _TEXT, st.lists(st.integers(0, 200), max_size=60))
@settings(max_examples=200, deadline=None)
def test_a_prompt_before_the_answer_changes_nothing(
    prompt: str, text: str, cuts: list[int]
) -> None:
    start = len(prompt.encode())
    answer = Pieces(text.encode(), cuts)
    tokenizer = Pieces(b"", [])
    tokenizer.pieces = [prompt.encode()[i : i + 1] for i in range(start)] + answer.pieces
    assert "".join(push_all(tokenizer, num_prompt=start)) == text


@given(
    _TEXT,
    st.text(alphabet="aab \n日🎉", min_size=1, max_size=4),
    st.lists(st.integers(0, 200), max_size=60),
)
@settings(max_examples=400, deadline=None)
def test_one_stop_string_cuts_at_its_first_place_however_tokens_are_cut(
    text: str, stop: str, cuts: list[int]
) -> None:
    chunks = push_all(Pieces(text.encode(), cuts), (stop,))
    expected = text[: text.find(stop)] if stop in text else text
    assert "".join(chunks) == expected


@given(
    st.text(alphabet="abc", max_size=20),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=4),
)
@settings(max_examples=400, deadline=None)
def test_of_several_stop_strings_the_first_to_be_complete_wins(text: str, stops: list[str]) -> None:
    chunks = push_all(Pieces(text.encode(), range(len(text))), tuple(stops))
    # Letter by letter: the shortest beginning of the text that ends in a stop string.
    expected = text
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            expected = text[: end - max(map(len, complete))]
            break
    assert "".join(chunks) == expected


@pytest.mark.parametrize("num_noise", [1, 63, 64, 65, 200])
def test_bytes_that_are_no_character_do_not_hold_text_back_for_ever(num_noise: int) -> None:
    tokenizer = Pieces(b"ok" + b"\x80" * num_noise + b"then words", range(300))
    text = "".join(push_all(tokenizer))
    assert text == "ok" + "\ufffd" * num_noise + "then words"
    detokenizer = Detokenizer(lambda ids: "\ufffd" * len(ids), (), ())
    assert any(detokenizer.push(0) for _ in range(100))


def test_nothing_comes_after_a_stop_string() -> None:
    tokenizer = Pieces(b"a|bc", range(5))
    detokenizer = Detokenizer(tokenizer.decode, (), ("|",))
    pieces = [detokenizer.push(i) for i in range(len(tokenizer.pieces))]
    assert "".join(pieces) == "a"
    assert detokenizer.is_stopped
    assert detokenizer.finish() == ""


def test_a_decoder_that_drops_the_first_space_keeps_it_inside_a_text() -> None:
    words = ["Say", "▁hello", "▁big", "▁world"]

    def decode(ids: Sequence[int]) -> str:
        return "".join(words[i] for i in ids).replace("▁", " ").removeprefix(" ")

    detokenizer = Detokenizer(decode, (0,), ())
    assert [detokenizer.push(i) for i in (1, 2, 3)] == [" hello", " big", " world"]
