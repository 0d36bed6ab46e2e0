"""Streamed text is whole characters, never part of a stop string, and nothing gets lost."""

from typing import Any

import pytest

from snapkv_core import CompressionConfig, FinishReason, RequestOutput, TokenEvent
from tests.support.engines import FULL, ask, drain, make_engine, make_request, summary_of, text_of
from tests.support.models import scripted_model


def stream_and_ask(pieces: list[bytes], **sampling: Any) -> tuple[list[TokenEvent], RequestOutput]:
    """Let a model say these pieces, once streamed and once not."""
    model, tokenizer = scripted_model(pieces)
    engine = make_engine(model, tokenizer)
    sampling = {"max_new_tokens": 64} | sampling
    engine.add_request(make_request("ppp", FULL, **sampling))
    events = drain(engine)
    assert engine.kv_bytes == 0
    return events, ask(engine, "ppp", FULL, **sampling)


def cut_into_bytes(text: str) -> list[bytes]:
    """Cut text into one piece per byte, the worst a byte-level tokenizer can do."""
    return [bytes([byte]) for byte in text.encode()]


@pytest.mark.parametrize(
    "text",
    [
        "plain words, nothing else",
        "日本語のテキスト",
        "🎉👩‍👩‍👧‍👦🏳️‍🌈 done",
        "naïve é́ 中文 🎉",
        "ends with an emoji 🎉",
        "🎉",
        " leading space and\nline\r\nbreaks\t",
    ],
)
def test_characters_that_span_tokens_arrive_whole(text: str) -> None:
    events, whole = stream_and_ask(cut_into_bytes(text), max_new_tokens=256)
    assert all("\ufffd" not in event.text for event in events)
    assert text_of(events) == text
    assert whole.texts == (text,)
    assert summary_of(events).finish_reasons == (FinishReason.STOP,)


def test_characters_cut_unevenly_arrive_whole() -> None:
    text = "a🎉b日本c"
    raw = text.encode()
    for size in range(1, len(raw)):
        pieces = [raw[start : start + size] for start in range(0, len(raw), size)]
        events, whole = stream_and_ask(pieces)
        assert all("\ufffd" not in event.text for event in events), size
        assert text_of(events) == text == whole.texts[0], size


def test_an_answer_cut_inside_a_character_loses_that_character_only() -> None:
    # Ten letters and two of an emoji's four bytes.
    events, whole = stream_and_ask(cut_into_bytes("0123456789🎉"), max_new_tokens=12)
    assert text_of(events) == whole.texts[0] == "0123456789"
    assert summary_of(events).finish_reasons == (FinishReason.LENGTH,)


@pytest.mark.parametrize(
    ("pieces", "stop", "expected"),
    [
        ([b"one ", b"two ", b"STOP", b" three"], ("STOP",), "one two "),
        ([b"one ", b"two S", b"TO", b"P three"], ("STOP",), "one two "),
        ([b"S", b"T", b"O", b"P", b"x"], ("STOP",), ""),
        ([b"STOP", b" x"], ("STOP",), ""),
        ([b"xSTOP y", b" z"], ("STOP",), "x"),
        ([b"aa", b"ab", b"c"], ("aab",), "a"),
        ([b"ab", b"ab", b"ac"], ("abac",), "ab"),
        ([b"one", b"\n\n", b"two"], ("\n\n",), "one"),
        ([b"one\n", b"\ntwo"], ("\n\n",), "one"),
        ([b"x first", b" second"], ("second", "first"), "x "),
        ([b"x first second", b" y"], ("second", "first"), "x "),
        ([b"abcd", b"e"], ("bcde", "cd"), "ab"),
        ([b"\xe6\x97", b"\xa5\xe6", b"\x9c\xac!", b"?"], ("本",), "日"),
        ([b"\xe6", b"\x97", b"\xa5", b"!"], ("日",), ""),
        ([b"no ", b"STO", b" here"], ("STOP",), "no STO here"),
        ([b"ends in ", b"STO"], ("STOP",), "ends in STO"),
        ([b"S", b"S", b"S", b"TOP"], ("STOP",), "SS"),
    ],
)
def test_stop_strings_end_the_answer_wherever_tokens_are_cut(
    pieces: list[bytes], stop: tuple[str, ...], expected: str
) -> None:
    events, whole = stream_and_ask(pieces, stop=stop)
    assert text_of(events) == expected
    assert whole.texts == (expected,)
    assert summary_of(events).finish_reasons == (FinishReason.STOP,)
    so_far = ""
    for event in events:
        so_far += event.text
        assert expected.startswith(so_far), "a chunk leaked text that had to be taken back"


def test_a_stop_string_ends_generation_early_and_frees_the_kv() -> None:
    _, whole = stream_and_ask([b"one ", b"two", b" three", b" four"] * 10, stop=("two",))
    assert whole.texts == ("one ",)
    assert whole.summary.num_output_tokens <= 3


def test_a_stop_string_that_the_last_allowed_token_completes_is_a_stop() -> None:
    events, _ = stream_and_ask([b"one ", b"ST", b"OP", b" x"], stop=("STOP",), max_new_tokens=3)
    assert text_of(events) == "one "
    assert summary_of(events).finish_reasons == (FinishReason.STOP,)


def test_text_held_back_for_a_stop_string_comes_at_the_length_limit() -> None:
    events, _ = stream_and_ask([b"one ", b"ST", b"OP", b" x"], stop=("STOP",), max_new_tokens=2)
    assert text_of(events) == "one ST"
    assert summary_of(events).finish_reasons == (FinishReason.LENGTH,)


def test_text_comes_as_it_is_made() -> None:
    events, _ = stream_and_ask([b"one ", b"two ", b"three"])
    assert [event.text for event in events if event.text] == ["one ", "two ", "three"]


def test_a_stop_string_in_the_prompt_does_not_end_the_answer() -> None:
    events, whole = stream_and_ask([b"answer"], stop=("ppp", "pa", "pans"))
    assert text_of(events) == whole.texts[0] == "answer"


def test_compression_changes_no_scripted_text() -> None:
    model, tokenizer = scripted_model(cut_into_bytes("日本語 🎉 ok"))
    engine = make_engine(model, tokenizer)
    compression = CompressionConfig(max_capacity_prompt=10, window_size=4, kernel_size=3)
    output = ask(engine, "p" * 60, compression, max_new_tokens=64)
    assert output.texts == ("日本語 🎉 ok",)
    assert output.summary.compression is not None
    assert output.summary.compression.compressed_entries == 10
