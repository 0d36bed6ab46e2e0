"""Chat templates that know tools: what they are given, and how their models write calls."""

import json
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from snapkv_core.errors import InvalidParameterError
from snapkv_core.events import ChatMessage, ToolCall
from snapkv_core.models.tokenizer import HFTokenizer

PLAIN = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
TAGS = (
    "{% if tools %}Tools:{% for tool in tools %} {{ tool | tojson }}{% endfor %} "
    "Call with <tool_call>...</tool_call>\n{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }}"
    "({{ call.function.arguments.city }})#{{ call.id }}</tool_call>{% endfor %}"
    "{% if message.tool_call_id %}@{{ message.tool_call_id }}{% endif %}\n{% endfor %}"
)
MARKER = "{% if tools %}[AVAILABLE_TOOLS]{{ tools | length }}{% endif %}[TOOL_CALLS]"
UNKNOWN = "{% if tools %}{{ tools | length }} tools{% endif %}{{ messages[0].content }}"
TOOL = json.dumps({"type": "function", "function": {"name": "weather"}})


def tokenizer_with(template: Any) -> tuple[HFTokenizer, PreTrainedTokenizerFast]:
    """Build a byte-level tokenizer with a chat template and Mistral's special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("</s>", special=True), AddedToken("[TOOL_CALLS]")])
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    theirs.chat_template = template
    return HFTokenizer(theirs), theirs


def test_a_template_is_given_tools_and_calls_as_transformers_gives_them() -> None:
    ours, theirs = tokenizer_with(TAGS)
    messages = [
        ChatMessage("user", "Rain?"),
        ChatMessage("assistant", None, (ToolCall("c1", "weather", '{"city": "Kyōto"}'),)),
        ChatMessage("tool", "no", (), "c1"),
    ]
    call = {"name": "weather", "arguments": {"city": "Kyōto"}}
    calls = [{"id": "c1", "type": "function", "function": call}]
    turns: list[Any] = [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "no", "tool_call_id": "c1"},
    ]
    expected = theirs.apply_chat_template(
        turns,
        tools=[json.loads(TOOL)],
        tokenize=False,
        add_generation_prompt=True,
    )
    rendered = ours.render_chat(messages, [TOOL])
    assert rendered == expected
    assert "<tool_call>weather(Kyōto)#c1</tool_call>" in rendered
    assert rendered.endswith("tool: no@c1")
    assert "Tools" not in ours.render_chat(messages[:1])


@pytest.mark.parametrize(
    ("template", "syntax"),
    [
        (TAGS, "tags"),
        (MARKER, "marker"),
        (UNKNOWN, None),
        (PLAIN, None),
        ({"default": PLAIN, "tool_use": TAGS}, "tags"),
        (None, None),
    ],
)
def test_a_template_tells_how_calls_are_written(template: Any, syntax: str | None) -> None:
    ours, _ = tokenizer_with(template)
    assert ours.tool_syntax == syntax


def test_a_template_of_its_own_for_tools_is_used_with_tools_only() -> None:
    ours, _ = tokenizer_with({"default": PLAIN, "tool_use": TAGS})
    messages = [ChatMessage("user", "a")]
    assert ours.render_chat(messages) == "user: a\n"
    assert ours.render_chat(messages, [TOOL]).startswith("Tools: ")


@pytest.mark.parametrize("template", [PLAIN, {"default": PLAIN}])
def test_a_template_without_a_place_for_tools_refuses_them(template: Any) -> None:
    ours, _ = tokenizer_with(template)
    with pytest.raises(InvalidParameterError, match="no place") as caught:
        ours.render_chat([ChatMessage("user", "a")], [TOOL])
    assert caught.value.field == "tools"


def test_a_marker_of_calls_is_text_and_other_special_tokens_are_not() -> None:
    ours, theirs = tokenizer_with(MARKER)
    ids = theirs.encode("ä[TOOL_CALLS][1]</s>")
    assert ours.decode(ids) == "ä[TOOL_CALLS][1]"
    assert ours.decode(ids[:2]) == "ä"
