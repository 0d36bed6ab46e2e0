"""Answers held to a JSON schema match it, by the judgement of the reference validator."""

import json
import random
import time
from functools import cache
from typing import Any

import jsonschema
import pytest

from snapkv_core import CompressionConfig, Engine, FinishReason, InvalidParameterError
from snapkv_core.engine.answer_schema import MAX_SCHEMA_DEPTH, SUPPORTED_KEYWORDS
from snapkv_core.engine.constraint import JSONConstraint, SchemaCompiler
from tests.support.engines import ask, make_engine, make_request, run_together, text_of
from tests.support.models import ByteTokenizer, build_model, random_prompt
from tests.support.schemas import bounded_schema

NUM_SCHEMAS = 100
_PROMPT = random_prompt(60, seed=4)
_COMPRESSION = CompressionConfig(max_capacity_prompt=30, window_size=8, kernel_size=3)
#: No answer to a bounded schema is longer: the model writes one byte a token.
_ENOUGH = 600


@cache
def shared_engine() -> Engine:
    """Build one engine for the whole file."""
    return make_engine(build_model("llama", 2, seed=31), max_num_seqs=16)


def schema_of(number: int) -> dict[str, Any]:
    """Draw a schema by its number; `$ref` is only understood from the root."""
    schema = bounded_schema(random.Random(number))
    text = json.dumps(schema)
    if "$defs" in text and "$defs" not in schema:
        schema["$defs"] = {"digit": {"type": "integer", "minimum": 0, "maximum": 9}}
    return schema


def is_valid(text: str, schema: dict[str, Any]) -> bool:
    """Ask the reference validator, formats included."""
    validator = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    return bool(validator.is_valid(json.loads(text)))


@pytest.mark.parametrize("start", range(0, NUM_SCHEMAS, 20))
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.5, "seed": 7}], ids=["greedy", "warm"])
def test_an_answer_that_stops_matches_its_schema(start: int, sampling: dict[str, Any]) -> None:
    """And one that is too short for it is the beginning of the answer that is not."""
    engine = shared_engine()
    schemas = [schema_of(number) for number in range(start, start + 20)]
    asked = [{"json_schema": json.dumps(schema), **sampling} for schema in schemas]
    whole = run_together(
        engine,
        [make_request(_PROMPT, _COMPRESSION, max_new_tokens=_ENOUGH, **each) for each in asked],
    )
    cut = run_together(
        engine, [make_request(_PROMPT, _COMPRESSION, max_new_tokens=3, **each) for each in asked]
    )
    for schema, full, short in zip(schemas, whole, cut, strict=True):
        assert full[-1].finish_reason is FinishReason.STOP, schema
        assert is_valid(text_of(full), schema), (schema, text_of(full))
        assert text_of(full).startswith(text_of(short))
        is_cut = short[-1].finish_reason is FinishReason.LENGTH
        assert is_cut or text_of(short) == text_of(full)


def test_each_choice_has_its_own_place_in_the_schema() -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 3}
    schema["items"] = {"type": "integer", "minimum": 0, "maximum": 99999}
    output = ask(
        shared_engine(),
        _PROMPT,
        json_schema=json.dumps(schema),
        n=5,
        temperature=2.0,
        seed=1,
        max_new_tokens=60,
    )
    assert len(set(output.texts)) == 5
    assert all(is_valid(text, schema) for text in output.texts)


def test_any_object_will_do_where_no_schema_is_given() -> None:
    output = ask(
        shared_engine(),
        _PROMPT,
        json_schema='{"type": "object"}',
        logit_bias=((ord("}"), 100.0), (ord('"'), 50.0)),
        max_new_tokens=50,
    )
    assert isinstance(json.loads(output.texts[0]), dict)


def test_a_neighbour_in_json_changes_nothing() -> None:
    engine = shared_engine()
    plain = ask(engine, _PROMPT, max_new_tokens=20, ignore_eos=True)
    requests = [
        make_request(_PROMPT, json_schema='{"type": "integer", "maximum": 9, "minimum": 0}'),
        make_request(_PROMPT, max_new_tokens=20, ignore_eos=True),
    ]
    number, other = run_together(engine, requests)
    assert text_of(other) == plain.texts[0]
    assert int(text_of(number)) in range(10)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"not": {"type": "string"}}, "'not' at #"),
        ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, "'oneOf' at #"),
        ({"properties": {"a": {"if": {}}}}, "'if' at #/properties/a"),
        ({"items": {"uniqueItems": True}}, "'uniqueItems' at #/items"),
        ({"anyOf": [{}, {"contains": {}}]}, "'contains' at #/anyOf/1"),
        ({"$defs": {"d": {"dependentRequired": {}}}}, "'dependentRequired' at #/\\$defs/d"),
        ({"type": "string", "minLenght": 3}, "'minLenght' at #"),
        ({"x-guidance": {"lenient": True}}, "'x-guidance' at #"),
        ({"type": "string", "format": "colour"}, "colour"),
        ({"type": "strin"}, "strin"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-ahead"),
        ({"type": "string", "pattern": "("}, "regex"),
        ({"$ref": "#/definitions/x"}, "does not exist"),
        ({"$ref": "https://example.com/schema"}, "not present|does not fetch"),
        ({"$ref": "file:///etc/passwd"}, "not present|does not fetch"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "[Uu]nsatisfiable"),
        ({"enum": []}, "[Uu]nsatisfiable"),
        ({"$ref": "#"}, "allows nothing|too complex"),
        ({"properties": [1]}, "properties"),
        ({"properties": {"a": 1}}, "#/properties/a must be a schema"),
        ({"type": "object", "required": "a"}, "required"),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_a_schema_that_cannot_be_used_is_refused_with_the_reason(
    schema: dict[str, Any], reason: str
) -> None:
    """Before anything is queued."""
    engine = shared_engine()
    with pytest.raises(InvalidParameterError, match=reason) as caught:
        engine.prepare(make_request(_PROMPT, json_schema=json.dumps(schema)))
    assert caught.value.field == "json_schema"
    assert len(str(caught.value)) < 500
    assert not engine.has_work


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "true", '"a"', "[" * 9_000, '{"a": ' * 9_000, " " * 100_001]
)
def test_what_is_no_schema_is_refused(text: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        shared_engine().prepare(make_request(_PROMPT, json_schema=text))
    assert caught.value.field == "json_schema"


def test_a_schema_may_be_deep_but_not_deeper() -> None:
    def nested(depth: int) -> str:
        schema: dict[str, Any] = {"type": "integer"}
        for _ in range(depth - 1):
            schema = {"anyOf": [schema]}
        return json.dumps(schema)

    shared_engine().prepare(make_request(_PROMPT, json_schema=nested(MAX_SCHEMA_DEPTH)))
    with pytest.raises(InvalidParameterError, match="deep"):
        shared_engine().prepare(make_request(_PROMPT, json_schema=nested(MAX_SCHEMA_DEPTH + 1)))


def test_every_supported_keyword_restricts_what_it_should() -> None:
    """A keyword that the grammar silently ignored would let one of these values through."""
    refused: dict[str, tuple[dict[str, Any], str]] = {
        "$defs": ({"$ref": "#/$defs/d", "$defs": {"d": {"type": "null"}}}, "1"),
        "$ref": ({"$ref": "#/$defs/d", "$defs": {"d": {"const": 1}}}, "2"),
        "additionalProperties": ({"type": "object", "additionalProperties": False}, '{"a": 1}'),
        "allOf": ({"allOf": [{"minimum": 5}, {"type": "integer", "maximum": 6}]}, "4"),
        "anyOf": ({"anyOf": [{"const": 1}, {"const": 2}]}, "3"),
        "const": ({"const": "a"}, '"b"'),
        "definitions": ({"$ref": "#/definitions/d", "definitions": {"d": {"const": 1}}}, "2"),
        "enum": ({"enum": [1, 2]}, "3"),
        "exclusiveMaximum": ({"type": "integer", "exclusiveMaximum": 5}, "5"),
        "exclusiveMinimum": ({"type": "integer", "exclusiveMinimum": 5}, "5"),
        "format": ({"type": "string", "format": "date"}, '"2026-13-01"'),
        "items": ({"type": "array", "items": {"type": "integer"}}, '["a"]'),
        "maxItems": ({"type": "array", "items": {"const": 1}, "maxItems": 1}, "[1, 1]"),
        "maxLength": ({"type": "string", "maxLength": 1}, '"ab"'),
        "maxProperties": ({"type": "object", "maxProperties": 1}, '{"a": 1, "b": 1}'),
        "maximum": ({"type": "integer", "maximum": 5}, "6"),
        "minItems": ({"type": "array", "items": {"const": 1}, "minItems": 2}, "[1]"),
        "minLength": ({"type": "string", "minLength": 2}, '"a"'),
        "minProperties": ({"type": "object", "minProperties": 2}, '{"a": 1}'),
        "minimum": ({"type": "integer", "minimum": 5}, "4"),
        "multipleOf": ({"type": "integer", "multipleOf": 3}, "4"),
        "pattern": ({"type": "string", "pattern": "^a+$"}, '"b"'),
        "patternProperties": (
            {
                "type": "object",
                "patternProperties": {"^a": {"type": "integer"}},
                "additionalProperties": False,
            },
            '{"ab": "x"}',
        ),
        "prefixItems": ({"type": "array", "prefixItems": [{"const": 1}]}, "[2]"),
        "properties": ({"type": "object", "properties": {"a": {"const": 1}}}, '{"a": 2}'),
        "required": ({"type": "object", "properties": {"a": {}}, "required": ["a"]}, "{}"),
        "type": ({"type": "integer"}, '"a"'),
    }
    assert set(refused) == SUPPORTED_KEYWORDS
    compiler = SchemaCompiler(ByteTokenizer().vocabulary)
    for keyword, (schema, text) in refused.items():
        assert not is_valid(text, schema), keyword  # the validator agrees that it is wrong
        assert not accepts(compiler.compile(json.dumps(schema)), text), keyword


def accepts(constraint: JSONConstraint, text: str) -> bool:
    """Tell whether a constraint lets a whole text and its end through."""
    walking = constraint.copy()
    for token_id in (*text.encode(), *ByteTokenizer.eos_token_ids):
        if not walking.allowed()[token_id]:
            return False
        walking.accept(token_id)
    return True


def test_a_schema_that_takes_too_long_is_refused_in_time() -> None:
    compiler = SchemaCompiler(ByteTokenizer().vocabulary, timeout_s=0.05)
    start_s = time.monotonic()
    with pytest.raises(InvalidParameterError, match=r"more than 0\.05 s to compile"):
        compiler.compile('{"type": "integer", "multipleOf": 1000003}')
    assert time.monotonic() - start_s < 5


def test_a_mask_that_leaves_no_token_fails_that_sequence_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = shared_engine()
    plain = ask(engine, _PROMPT, max_new_tokens=20, ignore_eos=True)
    lame = make_request(_PROMPT, json_schema='{"type": "integer"}', n=2)
    group = engine.prepare(lame)
    monkeypatch.setattr(group[1], "constraint", _NothingAllowed())
    engine.add(lame, group)
    other = make_request(_PROMPT, max_new_tokens=20, ignore_eos=True)
    (others,) = run_together(engine, [other])
    assert text_of(others) == plain.texts[0]
    assert not engine.has_work


class _NothingAllowed:
    def allowed(self) -> bytes:
        raise InvalidParameterError("json_schema", "allows nothing here")

    def accept(self, token_id: int) -> None:
        raise AssertionError(f"token {token_id} was chosen all the same")


@pytest.mark.parametrize("field", ["stop", "ignore_eos"])
def test_what_would_cut_json_is_refused(field: str) -> None:
    value: Any = ("x",) if field == "stop" else True
    with pytest.raises(InvalidParameterError, match="json_schema") as caught:
        make_request(_PROMPT, json_schema="{}", **{field: value})
    assert caught.value.field == field
