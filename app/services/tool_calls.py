"""Finds calls of tools in what a model writes, and the schema that makes it write one."""

import json
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from snapkv_core import ToolCall

_OPENING: Final = "<tool_call>"
_CLOSING: Final = "</tool_call>"
_MARKER: Final = "[TOOL_CALLS]"
#: Where the schema of the arguments stands in that of a call.
_PLACE: Final = "/properties/arguments"


@dataclass(slots=True)
class Written:
    """What a piece of an answer brought.

    Attributes:
        text: What was said.
        calls: Calls that were completed.
    """

    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)


class ToolCallReader(Protocol):
    """Reads one answer, piece by piece; nothing is lost: what is no call is text."""

    def push(self, text: str) -> Written:
        """Take the next piece."""

    def finish(self) -> Written:
        """Take the end of the answer."""


class TagsReader:
    """Calls between tags, each a JSON object with `name` and `arguments`."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held = ""
        self._has_calls = False

    def push(self, text: str) -> Written:
        """See `ToolCallReader.push`."""
        self._held += text
        written = Written()
        while True:
            before, opening, rest = self._held.partition(_OPENING)
            if not opening:
                num_certain = len(self._held) - _overlap(self._held, _OPENING)
                self._say(written, self._held[:num_certain])
                self._held = self._held[num_certain:]
                return written
            inside, closing, after = rest.partition(_CLOSING)
            if not closing:
                self._say(written, before)
                self._held = opening + rest
                return written
            self._say(written, before)
            call = _call_of(_parsed(inside), self._names)
            if call is None:
                written.text += opening + inside + closing
            else:
                written.calls.append(call)
                self._has_calls = True
            self._held = after

    def finish(self) -> Written:
        """See `ToolCallReader.finish`: a call that was begun and not ended is text."""
        written, rest = Written(), self._held
        self._held = ""
        self._say(written, rest)
        return written

    def _say(self, written: Written, text: str) -> None:
        # Between calls models write line ends, which say nothing.
        if text.strip() or not self._has_calls:
            written.text += text


class MarkerReader:
    """A marker, then a JSON list of calls up to the end."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held = ""

    def push(self, text: str) -> Written:
        """See `ToolCallReader.push`."""
        self._held += text
        before, marker, rest = self._held.partition(_MARKER)
        num_certain = len(before) if marker else len(before) - _overlap(before, _MARKER)
        self._held = before[num_certain:] + marker + rest
        return Written(before[:num_certain])

    def finish(self) -> Written:
        """See `ToolCallReader.finish`."""
        calls = _calls_of(_parsed(self._held.removeprefix(_MARKER)), self._names)
        return Written(calls=calls) if calls else Written(self._held)


class WholeReader:
    """The whole answer is one call, since the schema of `forcing_schema` let nothing else be."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held = ""

    def push(self, text: str) -> Written:
        """See `ToolCallReader.push`."""
        self._held += text
        return Written()

    def finish(self) -> Written:
        """See `ToolCallReader.finish`: an answer that was cut off is text."""
        call = _call_of(_parsed(self._held), self._names)
        return Written(self._held) if call is None else Written(calls=[call])


def forcing_schema(tools: Sequence[tuple[str, dict[str, Any] | None]]) -> str:
    """Return the JSON schema of a call of one of these tools.

    Args:
        tools: Names, and the JSON schemas of their arguments; None is any object.
    """
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": name},
                "arguments": _moved(parameters or {"type": "object"}, f"#/anyOf/{number}{_PLACE}"),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for number, (name, parameters) in enumerate(tools)
    ]
    return json.dumps({"anyOf": calls})


def _moved(schema: Any, place: str) -> Any:
    """Return a schema whose references are right where it stands inside another one."""
    if isinstance(schema, list):
        return [_moved(part, place) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: place + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, place)
        for key, value in schema.items()
    }


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _calls_of(value: Any, names: Collection[str]) -> list[ToolCall]:
    calls = [_call_of(each, names) for each in value] if isinstance(value, list) else []
    return [] if None in calls else [call for call in calls if call is not None]


def _call_of(value: Any, names: Collection[str]) -> ToolCall | None:
    if not isinstance(value, dict):
        return None
    name, arguments = value.get("name"), value.get("arguments")
    if not isinstance(name, str) or name not in names or not isinstance(arguments, dict):
        return None
    # Nine letters and digits: the templates of Mistral's models take no other length.
    return ToolCall(secrets.token_hex(5)[:9], name, json.dumps(arguments, ensure_ascii=False))


def _overlap(text: str, sign: str) -> int:
    """Length of the longest end of `text` that begins `sign`."""
    longest = min(len(text), len(sign) - 1)
    return next((size for size in range(longest, 0, -1) if sign.startswith(text[-size:])), 0)
