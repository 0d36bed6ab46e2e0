"""Text to token ids and back, and the chat template."""

import copy
import json
import threading
from collections.abc import Sequence
from typing import Any, Protocol

from jinja2 import TemplateError

from snapkv_core.errors import InvalidParameterError
from snapkv_core.events import ChatMessage
from snapkv_core.models.tool_syntax import CALLS_MARKER, ToolSyntax, offers_tools, syntax_of
from snapkv_core.models.vocabulary import Vocabulary


class Tokenizer(Protocol):
    """What the engine asks of a tokenizer; called from several threads at once."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Turn text into ids; `add_special_tokens` adds what the model expects around a prompt."""

    def encode_with_offsets(
        self, text: str, *, add_special_tokens: bool = True
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Turn text into ids, and say which characters of it each of them stands for.

        Returns:
            The ids, and for each the first character and the one behind its last. Tokens that
            are parts of one character overlap in it; one that was added stands for none.

        Raises:
            InvalidParameterError: This tokenizer cannot tell.
        """

    def token_strs(self, token_ids: Sequence[int]) -> list[str]:
        """Return the entries of the vocabulary, which may spell bytes and blanks in their way."""

    def fewest_tokens(self, text: str) -> int:
        """Return a number of tokens that a text has at least, without looking at it closely."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Turn ids into text; bytes that are no character are U+FFFD.

        A token that announces calls of tools is a part of the text, special or not.
        """

    def vocabulary(self) -> Vocabulary:
        """Return all tokens as bytes; takes tenths of a second the first time.

        Raises:
            InvalidParameterError: The tokenizer is of a kind that does not tell them.
        """

    @property
    def tool_syntax(self) -> ToolSyntax | None:
        """How the model writes calls of tools; None where its chat template does not tell."""

    def render_chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[str] = (),
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Render a conversation with the model's template.

        Args:
            messages: The conversation.
            tools: JSON texts of the tools that the model may call.
            add_generation_prompt: Make it ready for the assistant's turn.

        Raises:
            InvalidParameterError: The model has no template, or it refuses these messages, or has
                no place for tools.
        """


class HFTokenizer:
    """`Tokenizer` over a transformers tokenizer.

    A fast one is called through its Rust core: the Python wrapper sets truncation on that core
    in each call, which raises "Already borrowed" when two threads meet. The core is a copy, free
    of the truncation and padding that a `tokenizer.json` may have been saved with.
    """

    def __init__(self, tokenizer: Any, eos_token_ids: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._backend = copy.deepcopy(getattr(tokenizer, "backend_tokenizer", None))
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()
        self._longest_token_chars = _longest_token_chars(self._backend)
        self._calls_marker_id = (
            None if self._backend is None else self._backend.token_to_id(CALLS_MARKER)
        )
        self._vocabulary: Vocabulary | None = None
        self._vocabulary_lock = threading.Lock()
        own = tokenizer.eos_token_id
        self._eos_token_ids = eos_token_ids | (frozenset() if own is None else frozenset({own}))

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer: the model's generation config and the tokenizer's own."""
        return self._eos_token_ids

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """See `Tokenizer.encode`."""
        if self._backend is None:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
            return ids
        # The batch call lets other threads run meanwhile; the single one holds them all up.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def encode_with_offsets(
        self, text: str, *, add_special_tokens: bool = True
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """See `Tokenizer.encode_with_offsets`."""
        if self._backend is None:
            raise InvalidParameterError(
                "return_offsets", "this model's tokenizer does not know what its tokens stand for"
            )
        (encoding,) = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids), list(encoding.offsets)

    def token_strs(self, token_ids: Sequence[int]) -> list[str]:
        """See `Tokenizer.token_strs`."""
        strings: list[str] = self._tokenizer.convert_ids_to_tokens(list(token_ids))
        return strings

    def fewest_tokens(self, text: str) -> int:
        """See `Tokenizer.fewest_tokens`; 0 where a tokenizer may shorten a text first."""
        if self._longest_token_chars is None:
            return 0
        return -(-len(text) // self._longest_token_chars)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """See `Tokenizer.decode`."""
        marker_id = self._calls_marker_id
        if skip_special_tokens and marker_id is not None and marker_id in token_ids:
            at = list(token_ids).index(marker_id)
            before, after = token_ids[:at], token_ids[at + 1 :]
            return self.decode(before) + CALLS_MARKER + self.decode(after)
        core = self._tokenizer if self._backend is None else self._backend
        return str(core.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def vocabulary(self) -> Vocabulary:
        """See `Tokenizer.vocabulary`."""
        if self._backend is None:
            raise InvalidParameterError(
                "model", "the bytes of its tokens are not known: it has no fast tokenizer"
            )
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(self._backend.to_str(), self._eos_token_ids)
            return self._vocabulary

    @property
    def tool_syntax(self) -> ToolSyntax | None:
        """See `Tokenizer.tool_syntax`."""
        template = self._template(with_tools=True)
        return None if template is None else syntax_of(template)

    def render_chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[str] = (),
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """See `Tokenizer.render_chat`."""
        if not self._tokenizer.chat_template:
            raise InvalidParameterError("messages", "this model has no chat template; send prompt")
        offered = [json.loads(tool) for tool in tools]
        template = self._template(with_tools=bool(offered))
        if offered and (template is None or not offers_tools(template)):
            raise InvalidParameterError("tools", "this model's chat template has no place for them")
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [_turn(message) for message in messages],
                    tools=offered or None,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                )
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise InvalidParameterError(
                "messages", f"the model's chat template refuses them: {error}"
            ) from error

    def _template(self, *, with_tools: bool) -> str | None:
        """Return the chat template; some models have another one for conversations with tools."""
        try:
            return str(self._tokenizer.get_chat_template(tools=[] if with_tools else None))
        except ValueError:
            return None


def _turn(message: ChatMessage) -> dict[str, Any]:
    """Return a message in the form that chat templates read."""
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.loads(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    return turn


def _longest_token_chars(backend: Any) -> int | None:
    """Return the most characters of a text that one token stands for; None when unknown.

    No token stands for more characters than it is written with: byte-level ones are written with
    a character for each byte, and the others as they are.
    """
    if backend is None or _may_shorten(json.loads(backend.to_str())["normalizer"]):
        return None
    return max((len(token) for token in backend.get_vocab(with_added_tokens=True)), default=None)


def _may_shorten(normalizer: Any) -> bool:
    """Tell whether a normalizer, as `tokenizer.json` has it, may take characters away."""
    if normalizer is None or normalizer["type"] == "Prepend":
        return False
    if normalizer["type"] == "Sequence":
        return any(_may_shorten(part) for part in normalizer["normalizers"])
    if normalizer["type"] == "Replace":
        pattern = normalizer["pattern"].get("String")
        return pattern is None or len(normalizer["content"]) < len(pattern)
    return True
