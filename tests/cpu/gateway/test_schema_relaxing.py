"""What guides keep of schemas that they cannot keep to: all that is valid by the schema can be written, as JSON."""

import json
import random
from itertools import islice
from typing import Any

import pytest

from kvforge.gateway.languages.schema_relaxing import ALL, ANY_OBJECT, Relaxed, relaxed
from kvforge.gateway.requests.functions import read_tools
from kvforge.runtime.guides.grammar import grammar_of
from kvforge.runtime.guides.limits import WIDE_JSON
from kvforge.runtime.guides.matchers import make_matcher, make_vocabulary
from kvforge.runtime.guides.schema_check import schema_problem
from kvforge.runtime.requests.guided_decoding import GuidedDecoding
from tests.support.hostile.schema_judge import any_root, any_value, is_valid, likely_value, spellings
from tests.support.models.text_tokenizers import byte_level

TOKENIZER = byte_level()
MAX_SPELLINGS = 3000
"""Orders of a value's members that are tried: a guide wants those of the schema first."""


def make(vocabulary: Any, schema: dict) -> Any:
    grammar = grammar_of(GuidedDecoding("json_schema", schema), lambda text: False)
    matcher = make_matcher(vocabulary, grammar, WIDE_JSON)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def kept(schema: dict) -> Relaxed:
    """Of a tool's parameters."""
    tools = read_tools({"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]})
    assert tools is not None
    return relaxed(tools.functions[0].parameters)


def accepts(matcher: Any, value: Any) -> bool:
    for text in islice(spellings(value), MAX_SPELLINGS):
        trial = matcher.deep_copy()
        ids = TOKENIZER.encode(text, add_special_tokens=False)
        if trial.try_consume_tokens(ids) == len(ids) and trial.is_accepting():
            return True
    return False


@pytest.fixture(scope="module")
def vocabulary() -> Any:
    return make_vocabulary(TOKENIZER, [2])


def random_values(rng: random.Random, schema: dict) -> list[Any]:
    """Valid ones."""
    found = [likely_value(rng, schema, schema) if rng.random() < 0.8 else any_value(rng) for _ in range(40)]
    try:
        return [value for value in found if isinstance(value, dict) and is_valid(schema, value, schema)]
    except RecursionError:  # a schema that refers to itself for the same value
        return []


@pytest.mark.parametrize("part", range(8))
def test_relaxed_schemas_allow_what_the_schemas_do(vocabulary: Any, part: int) -> None:
    num_values = num_relaxed = num_open = 0
    for seed in range(part * 50, part * 50 + 50):
        rng = random.Random(seed)
        schema = any_root(rng)
        found = kept(schema)
        assert schema_problem(found.schema) is None
        num_relaxed += bool(found.left)
        num_open += found.schema == ANY_OBJECT
        matcher = make(vocabulary, found.schema)
        for value in random_values(rng, schema):
            num_values += 1
            assert accepts(matcher, value), (seed, json.dumps(schema), value, found)
    assert num_values > 150 and num_relaxed > 20 and num_open < 10, (num_values, num_relaxed, num_open)


def test_what_relaxed_schemas_allow_is_json(vocabulary: Any) -> None:
    num_ended = 0
    for seed in range(100):
        rng = random.Random(seed)
        found = kept(any_root(rng))
        matcher = make(vocabulary, found.schema)
        ids: list[int] = []
        for _ in range(300):
            if matcher.is_accepting():
                num_ended += 1
                assert isinstance(json.loads(TOKENIZER.decode(ids)), dict), (seed, ids)
                break
            bits = matcher.compute_bitmask()
            allowed = [i for i in range(TOKENIZER.backend.get_vocab_size()) if bits[i // 8] >> i % 8 & 1]
            if not allowed:
                break
            closing = [i for i in allowed if TOKENIZER.decode([i]) in ('"', "}", "]")]
            ids.append(rng.choice(closing if closing and rng.random() < 0.7 else allowed))
            matcher.consume_token(ids[-1])
    assert num_ended > 50


def an_object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


TEXT = {"type": "string"}
RECURSIVE = {"type": "object", "properties": {"of": {"type": "array", "items": {"$ref": "#/$defs/N"}}}}
KEPT: dict[str, tuple[dict, list, list]] = {
    "draft 7's lists of items": (
        an_object(p={"items": [{"type": "number"}, TEXT], "additionalItems": False, "type": "array"}),
        [{"p": [1, "a"]}, {"p": []}], [{"p": ["a"]}, {"p": [1, "a", 1]}]),
    "draft 4's exclusive bound": (
        an_object(n={"type": "number", "minimum": 0, "exclusiveMinimum": True}), [{"n": 1}], [{"n": -1}]),
    "zod's never": ({"type": "object", "properties": {"a": {"not": {}}}}, [{}, {"b": 1}], [{"a": 1}]),
    "zod's names of properties": (
        an_object(h={"type": "object", "propertyNames": TEXT, "additionalProperties": TEXT}),
        [{"h": {"k": "v"}}], [{"h": {"k": 1}}]),
    "OpenAPI's nulls": ({"type": "object", "properties": {"a": TEXT}, "required": None}, [{}], [{"a": 1}]),
    "a reference in a circle": (
        {"type": "object", "properties": {"n": {"$ref": "#/$defs/N"}}, "$defs": {"N": RECURSIVE}},
        [{"n": {"of": [{"of": []}, {}]}}], [{"n": {"of": [1]}}]),
    "a reference to a property": (
        {"type": "object", "properties": {"a": TEXT, "b": {"$ref": "#/properties/a"}}}, [{"b": "x"}], [{"b": 1}]),
    "a reference out of ASCII": (
        {"type": "object", "properties": {"a": {"$ref": "#/definitions/Größe"}}, "definitions": {"Größe": TEXT}},
        [{"a": "x"}], [{"a": 1}]),
    "a schema with an address": (
        {"$id": "https://example.org/s", "$schema": "http://json-schema.org/draft-07/schema#",
         **an_object(a={"$ref": "#/$defs/T"}), "$defs": {"T": TEXT}}, [{"a": "x"}], [{"a": 1}]),
    "several types": ({"type": ["object", "null"], "properties": {"a": TEXT}}, [{"a": "x"}], [{"a": 1}]),
}  # fmt: skip
"""By name: schemas that are kept whole, with values of theirs and others."""


@pytest.mark.parametrize("name", KEPT)
def test_what_can_be_said_in_other_words_is_kept(vocabulary: Any, name: str) -> None:
    schema, good, bad = KEPT[name]
    found = kept(schema)
    assert found.left == ()
    matcher = make(vocabulary, found.schema)
    for value in good:
        assert accepts(matcher, value), value
    for value in bad:
        assert not accepts(matcher, value), value


DEEP = {"$defs": {"N": {**an_object(v={"type": "string", "format": "regex"}, n={"type": "integer"})}},
        **an_object(a={"type": "array", "items": {"$ref": "#/$defs/N"}})}  # fmt: skip
LEFT: dict[str, tuple[dict, list[str], list, list]] = {
    "look-around": (an_object(a={"type": "string", "pattern": "^(?!x)", "maxLength": 2}, b={"type": "integer"}),
                    ["pattern"], [{"a": "x", "b": 1}], [{"a": "x", "b": "1"}, {"a": "xyz", "b": 1}]),
    "a format": (an_object(a={"type": "string", "format": "phone"}), ["format"], [{"a": "1"}], [{"a": 1}]),
    "a condition": (an_object(a=TEXT) | {"if": {"required": ["a"]}, "then": {"required": ["b"]}},
                    ["if", "then"], [{"a": "x"}], [{"a": 1}]),
    "a negation": (an_object(a={"type": "string", "not": {"const": "x"}}), ["not"], [{"a": "x"}], [{"a": 1}]),
    "one of two that both match": (an_object(a={"oneOf": [{"type": "number"}, {"type": "integer"}, TEXT]}),
                                   ["oneOf"], [{"a": 1}, {"a": "x"}], [{"a": None}]),
    "no address": (an_object(a={"$ref": "https://a.org/s", "type": "string"}), ["$ref"], [{"a": "x"}], [{"a": 1}]),
    "no type": (an_object(a={"type": "any"}, b=TEXT), ["type"], [{"a": 1, "b": "x"}], [{"a": 1, "b": 1}]),
    "patterns that overlap": (
        {"type": "object", "properties": {"a": TEXT}, "additionalProperties": False,
         "patternProperties": {"^x": TEXT, "y$": {"maxLength": 1}}},
        ["additionalProperties", "patternProperties"], [{"x": "1"}, {"b": 1}], [{"a": 1}]),
    "in what is referred to": (DEEP, ["format"], [{"a": [{"v": "(", "n": 1}]}], [{"a": [{"v": "(", "n": "1"}]}]),
    "nothing else matches": (an_object(a={"enum": []}, b=TEXT), ["enum"], [{"a": 1, "b": "x"}], [{"a": 1, "b": 1}]),
}  # fmt: skip
"""By name: schemas, the keywords that guides cannot keep, and values that can and cannot be written all the same."""


@pytest.mark.parametrize("name", LEFT)
def test_only_what_cannot_be_kept_is_left(vocabulary: Any, name: str) -> None:
    schema, left, good, bad = LEFT[name]
    found = kept(schema)
    assert list(found.left) == left
    matcher = make(vocabulary, found.schema)
    for value in good:
        assert accepts(matcher, value), value
    for value in bad:
        assert not accepts(matcher, value), value


def test_what_takes_too_much_to_find_out_is_left_altogether() -> None:
    schema = TEXT
    for _ in range(60):
        schema = an_object(a=schema, b={"type": "string", "not": {"const": "x"}, "format": "phone", "maxLength": 9})
    assert kept(schema) == Relaxed(ANY_OBJECT, (ALL,))
