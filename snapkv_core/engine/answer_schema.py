"""Which JSON schemas an answer can be held to, checked before anything is compiled."""

import json
from collections.abc import Iterator
from typing import Any, Final

from snapkv_core.errors import InvalidParameterError

FIELD: Final = "json_schema"
MAX_SCHEMA_CHARS: Final = 100_000
MAX_SCHEMA_DEPTH: Final = 32

#: Keywords that hold a schema, a list of schemas, and schemas by name.
_ONE: Final = frozenset({"additionalProperties", "items"})
_LIST: Final = frozenset({"allOf", "anyOf", "prefixItems"})
_NAMED: Final = frozenset({"$defs", "definitions", "patternProperties", "properties"})
_PLAIN: Final = frozenset(
    {
        "$ref",
        "const",
        "enum",
        "exclusiveMaximum",
        "exclusiveMinimum",
        "format",
        "maxItems",
        "maxLength",
        "maxProperties",
        "maximum",
        "minItems",
        "minLength",
        "minProperties",
        "minimum",
        "multipleOf",
        "pattern",
        "required",
        "type",
    }
)
#: Words about a schema that demand nothing of an answer.
_NOTES: Final = frozenset(
    {
        "$anchor",
        "$comment",
        "$id",
        "$schema",
        "default",
        "deprecated",
        "description",
        "examples",
        "readOnly",
        "title",
        "writeOnly",
    }
)
SUPPORTED_KEYWORDS: Final = _ONE | _LIST | _NAMED | _PLAIN


def require_supported(schema_json: str) -> None:
    """Check that a schema says nothing that would be ignored.

    Raises:
        InvalidParameterError: It is too long or too deep, is no JSON object, or has a keyword
            that is not supported; names it and where it is.
    """
    if len(schema_json) > MAX_SCHEMA_CHARS:
        raise InvalidParameterError(FIELD, f"must have at most {MAX_SCHEMA_CHARS} characters")
    try:
        schema = json.loads(schema_json)
    except (ValueError, RecursionError):
        raise InvalidParameterError(FIELD, "must be a JSON schema, as JSON") from None
    if not isinstance(schema, dict):
        raise InvalidParameterError(FIELD, "must be a JSON object")
    open_parts: list[tuple[str, Any, int]] = [("#", schema, 1)]
    while open_parts:
        path, part, depth = open_parts.pop()
        # true and false are schemas as well.
        if isinstance(part, bool):
            continue
        if not isinstance(part, dict):
            raise InvalidParameterError(FIELD, f"{path} must be a schema: a JSON object")
        if depth > MAX_SCHEMA_DEPTH:
            raise InvalidParameterError(FIELD, f"must be at most {MAX_SCHEMA_DEPTH} schemas deep")
        unknown = sorted(part.keys() - SUPPORTED_KEYWORDS - _NOTES)
        if unknown:
            raise InvalidParameterError(
                FIELD, f"the keyword {unknown[0][:80]!r} at {path[:200]} is not supported"
            )
        open_parts += [(where, inner, depth + 1) for where, inner in _inner(path, part)]


def _inner(path: str, schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Give the schemas right inside another one, each with its place."""
    for keyword, value in schema.items():
        here = f"{path}/{keyword}"
        if keyword in _ONE:
            yield here, value
        elif keyword in _LIST and isinstance(value, list):
            yield from ((f"{here}/{index}", inner) for index, inner in enumerate(value))
        elif keyword in _NAMED and isinstance(value, dict):
            yield from ((f"{here}/{name}", inner) for name, inner in value.items())
