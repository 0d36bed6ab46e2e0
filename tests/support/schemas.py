"""Random JSON schemas of bounded size, from the keywords that answers can be held to."""

import random
from typing import Any, Final

_NAMES: Final = ("a", "id", "name", "käse", 'quo"te', "x y")
_PATTERNS: Final = ("^[a-c]{1,3}$", "^(yes|no)$", "^[0-9]{2}-[A-Z]$")
_FORMATS: Final = ("date", "time", "uuid", "ipv4")


def bounded_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """Draw a schema whose every answer is short."""
    kinds = [_integer, _number, _text, _choice, _plain]
    if depth > 0:
        kinds += [_object, _object, _array, _tuple, _any_of, _referring]
    return rng.choice(kinds)(rng, depth - 1)


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    del depth
    low = rng.randint(-50, 50)
    schema: dict[str, Any] = {"type": "integer", "minimum": low}
    if rng.random() < 0.5:
        return schema | {"exclusiveMaximum": low + rng.randint(1, 200)}
    return schema | {"maximum": low + rng.randint(7, 200), "multipleOf": rng.choice([1, 2, 7])}


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    del depth
    low = rng.randint(-5, 5)
    return {"type": "number", "minimum": low, "maximum": low + 3, "multipleOf": 0.25}


def _text(rng: random.Random, depth: int) -> dict[str, Any]:
    del depth
    schema: dict[str, Any] = {"type": "string"}
    kind = rng.randrange(3)
    if kind == 0:
        return schema | {"pattern": rng.choice(_PATTERNS)}
    if kind == 1:
        return schema | {"format": rng.choice(_FORMATS)}
    low = rng.randint(0, 4)
    return schema | {"minLength": low, "maxLength": low + rng.randint(0, 5)}


def _choice(rng: random.Random, depth: int) -> dict[str, Any]:
    del depth
    values: list[Any] = ["red", "grün", 3, None, True, 2.5, ["a", 1], {"k": "v"}, ""]
    if rng.random() < 0.3:
        return {"const": rng.choice(values)}
    return {"enum": rng.sample(values, rng.randint(1, 4))}


def _plain(rng: random.Random, depth: int) -> dict[str, Any]:
    del depth
    return {"type": rng.choice(["boolean", "null", ["boolean", "null"]]), "title": "a note"}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_NAMES, rng.randint(0, 3))
    required = [name for name in names if rng.random() < 0.7]
    return {
        "type": "object",
        "description": "a note",
        "properties": {name: bounded_schema(rng, depth) for name in names},
        "required": required,
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(0, 2)
    return {
        "type": "array",
        "items": bounded_schema(rng, depth),
        "minItems": low,
        "maxItems": low + rng.randint(0, 2),
    }


def _tuple(rng: random.Random, depth: int) -> dict[str, Any]:
    parts = [bounded_schema(rng, depth) for _ in range(rng.randint(1, 2))]
    return {"type": "array", "prefixItems": parts, "minItems": len(parts), "maxItems": len(parts)}


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [bounded_schema(rng, depth) for _ in range(2)]}


def _referring(rng: random.Random, depth: int) -> dict[str, Any]:
    del depth
    part = {"type": "integer", "minimum": 0, "maximum": 9}
    return {
        "type": "object",
        "properties": {"left": {"$ref": "#/$defs/digit"}, "right": {"$ref": "#/$defs/digit"}},
        "required": rng.choice([["left"], ["left", "right"]]),
        "additionalProperties": False,
        "$defs": {"digit": part},
    }
