"""A plain judge of values by JSON Schema 2020-12, and random schemas that use most of its words, wrongly at times."""

import json
import random
import re
from collections.abc import Iterator
from itertools import permutations
from typing import Any

_NAMES = ["a", "b", "c", "x1"]
_TEXTS = ["", "a", "abc", "b", "xa", "12", "2020-02-03", 'é"\n', "cab"]
_PATTERNS = ["^[a-c]+$", "b", "^(?!x)a", "^[0-9]{2}$", "a$", "^(?=.*b)", "(unclosed"]
_FORMATS = ["date", "phone", "regex"]
_TYPES = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: _is_number(value) and value == int(value),
    "number": lambda value: _is_number(value),
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}


def is_valid(schema: Any, value: Any, root: Any) -> bool:
    """Whether ``value`` is as ``schema`` says, whose references are into ``root``. A word that a validator would not
    understand says nothing."""
    if isinstance(schema, bool):
        return schema
    schema = {word: said for word, said in schema.items() if said is not None or word == "const"}
    return all(word not in schema or check(schema, value, root) for word, check in _CHECKS.items())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _same(one: Any, other: Any) -> bool:
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _type(schema: Any, value: Any, root: Any) -> bool:
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return any(kind not in _TYPES or _TYPES[kind](value) for kind in kinds)


def _reference(schema: Any, value: Any, root: Any) -> bool:
    found = root
    for part in schema["$ref"].split("/")[1:]:
        found = found.get(part) if isinstance(found, dict) else None
    return found is None or is_valid(found, value, root)


def _if(schema: Any, value: Any, root: Any) -> bool:
    return is_valid(schema.get("then" if is_valid(schema["if"], value, root) else "else", True), value, root)


def _items(schema: Any, value: Any, root: Any) -> bool:
    if not isinstance(value, list):
        return True
    tuple_of = schema.get("items") if isinstance(schema.get("items"), list) else schema.get("prefixItems", [])
    rest = schema.get("additionalItems", True) if isinstance(schema.get("items"), list) else schema.get("items", True)
    own = [*tuple_of, *([rest] * len(value))]
    return all(is_valid(each, item, root) for each, item in zip(own, value, strict=False))


def _contains(schema: Any, value: Any, root: Any) -> bool:
    if not isinstance(value, list):
        return True
    count = sum(is_valid(schema["contains"], item, root) for item in value)
    return schema.get("minContains", 1) <= count <= schema.get("maxContains", len(value))


def _properties(schema: Any, value: Any, root: Any) -> bool:
    if not isinstance(value, dict):
        return True
    patterns = schema.get("patternProperties", {})
    for name, item in value.items():
        own = [schema.get("properties", {})[name]] if name in schema.get("properties", {}) else []
        own += [each for pattern, each in patterns.items() if re.search(pattern, name)]
        if not all(is_valid(each, item, root) for each in own or [schema.get("additionalProperties", True)]):
            return False
    return True


def _pattern(schema: Any, value: Any, root: Any) -> bool:
    try:
        return not isinstance(value, str) or re.search(schema["pattern"], value) is not None
    except re.error:
        return True


def _multiple(schema: Any, value: Any, root: Any) -> bool:
    return not _is_number(value) or (value / schema["multipleOf"]) == int(value / schema["multipleOf"])


def _unevaluated(schema: Any, value: Any, root: Any) -> bool:
    """Only of an object whose other words are about properties by name."""
    others = {word: schema[word] for word in ("properties", "patternProperties") if word in schema}
    return _properties({**others, "additionalProperties": schema["unevaluatedProperties"]}, value, root)


def _bound(word: str, fits: Any) -> Any:
    def check(schema: Any, value: Any, root: Any) -> bool:
        return not _is_number(value) or isinstance(schema[word], bool) or fits(value, schema[word])

    return check


def _size(word: str, kind: type, fits: Any) -> Any:
    return lambda schema, value, root: not isinstance(value, kind) or fits(len(value), schema[word])


def _below(one: Any, other: Any) -> bool:
    return one <= other


def _above(one: Any, other: Any) -> bool:
    return one >= other


_CHECKS = {
    "type": _type,
    "enum": lambda s, v, r: any(_same(v, each) for each in s["enum"]),
    "const": lambda s, v, r: _same(v, s["const"]),
    "$ref": _reference,
    "anyOf": lambda s, v, r: any(is_valid(each, v, r) for each in s["anyOf"]),
    "oneOf": lambda s, v, r: sum(is_valid(each, v, r) for each in s["oneOf"]) == 1,
    "allOf": lambda s, v, r: all(is_valid(each, v, r) for each in s["allOf"]),
    "not": lambda s, v, r: not is_valid(s["not"], v, r),
    "if": _if,
    "items": _items,
    "prefixItems": _items,
    "contains": _contains,
    "uniqueItems": lambda s, v, r: (
        not s["uniqueItems"]
        or not isinstance(v, list)
        or all(not _same(v[at], each) for at in range(len(v)) for each in v[at + 1 :])
    ),
    "properties": _properties,
    "patternProperties": _properties,
    "additionalProperties": _properties,
    "unevaluatedProperties": _unevaluated,
    "propertyNames": lambda s, v, r: not isinstance(v, dict) or all(is_valid(s["propertyNames"], n, r) for n in v),
    "required": lambda s, v, r: not isinstance(v, dict) or all(name in v for name in s["required"]),
    "dependentRequired": lambda s, v, r: (
        not isinstance(v, dict)
        or all(other in v for name, others in s["dependentRequired"].items() if name in v for other in others)
    ),
    "pattern": _pattern,
    "format": lambda s, v, r: s["format"] != "date" or not isinstance(v, str) or v == "2020-02-03",
    "multipleOf": _multiple,
    "minimum": _bound("minimum", _above),
    "maximum": _bound("maximum", _below),
    "minLength": _size("minLength", str, _above),
    "maxLength": _size("maxLength", str, _below),
    "minItems": _size("minItems", list, _above),
    "maxItems": _size("maxItems", list, _below),
    "minProperties": _size("minProperties", dict, _above),
    "maxProperties": _size("maxProperties", dict, _below),
}


def any_schema(rng: random.Random, depth: int = 3, count: int = 2) -> dict[str, Any]:
    """A schema of up to ``count`` groups of words, with references to #/$defs/A and #/$defs/B."""
    schema: dict[str, Any] = {}
    for _ in range(rng.randint(1, count)):
        schema.update(rng.choice(_LEAVES if depth == 0 else _LEAVES + 3 * _BRANCHES)(rng, depth - 1))
    return schema


def any_root(rng: random.Random) -> dict[str, Any]:
    """The same of an object, with what its references name."""
    root = {**any_schema(rng), **_object(rng, 2), "type": "object"}
    return {**root, "$defs": {"A": any_schema(rng, 2), "B": {**_object(rng, 1), "type": ["object", "null"]}}}


def _names(rng: random.Random) -> list[str]:
    return sorted(rng.sample(_NAMES, rng.randint(0, 3)))


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {"properties": {name: any_schema(rng, depth) for name in _names(rng)}}
    more = {
        "required": _names(rng), "additionalProperties": rng.choice([False, True, any_schema(rng, 0)]),
        "patternProperties": {rng.choice(["^x", "[0-9]$", "b"]): any_schema(rng, 0) for _ in range(2)},
        "dependentRequired": {"a": _names(rng)}, "propertyNames": rng.choice([{"type": "string"}, {"maxLength": 1}]),
        "minProperties": rng.randint(0, 2), "maxProperties": rng.randint(0, 3), "unevaluatedProperties": False,
    }  # fmt: skip
    return found | {word: more[word] for word in rng.sample(sorted(more), rng.choice([0, 0, 1, 2]))}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    more = {
        "items": rng.choice([any_schema(rng, depth), False, [any_schema(rng, 0), any_schema(rng, 0)]]),
        "minItems": rng.randint(0, 2), "maxItems": rng.randint(0, 3), "uniqueItems": rng.random() < 0.7,
        "contains": any_schema(rng, 0), "additionalItems": rng.choice([False, any_schema(rng, 0)]),
    }  # fmt: skip
    if rng.random() < 0.3:
        more["prefixItems"] = [any_schema(rng, 0) for _ in range(rng.randint(1, 2))]
        more["items"] = more["items"] if not isinstance(more["items"], list) else False
        return {"prefixItems": more["prefixItems"], "items": more["items"]}
    return {word: more[word] for word in rng.sample(sorted(more), rng.randint(1, 2))}


def _if_then(rng: random.Random, depth: int) -> dict[str, Any]:
    return {word: any_schema(rng, 0) for word in ("if", *rng.sample(["then", "else"], rng.randint(0, 2)))}


_LEAVES = [
    lambda rng, depth: {"type": rng.choice([*_TYPES, "any", ["string", "null"], ["integer", "array"]])},
    lambda rng, depth: {"enum": rng.sample(["a", 3, None, True, 0.5, [1], {"a": 1}], 3)},
    lambda rng, depth: {"const": rng.choice([*_TEXTS, 7, None])},
    lambda rng, depth: {"$ref": rng.choice(["#/$defs/A", "#/$defs/B", "#/nowhere", "#"])},
    lambda rng, depth: {"pattern": rng.choice(_PATTERNS)},
    lambda rng, depth: {"format": rng.choice(_FORMATS)},
    lambda rng, depth: (
        {rng.choice(["minimum", "exclusiveMinimum"]): rng.choice([0, True, -3, 2.5]), "type": "number"}
        if rng.random() < 0.1
        else {"minimum": rng.randint(-3, 3)}
    ),
    lambda rng, depth: {"maximum": rng.randint(-1, 9)},
    lambda rng, depth: {"multipleOf": rng.choice([1, 3, 0.5])},
    lambda rng, depth: {"minLength": rng.randint(0, 2)},
    lambda rng, depth: {"maxLength": rng.randint(0, 3)},
    lambda rng, depth: {"not": rng.choice([{}, {"type": "string"}, {"const": 7}])},
    lambda rng, depth: {"nullable": True, "description": "x", "properties": None},
]
_BRANCHES = [
    _object,
    _array,
    _if_then,
    *[
        lambda rng, depth, word=word: {word: [any_schema(rng, depth) for _ in range(rng.randint(1, 3))]}
        for word in ("anyOf", "oneOf", "allOf")
    ],
]


def any_value(rng: random.Random, depth: int = 3) -> Any:
    """A small value of JSON."""
    kind = rng.randrange(6 if depth else 4)
    if kind == 4:
        return [any_value(rng, depth - 1) for _ in range(rng.randrange(3))]
    if kind == 5:
        return {name: any_value(rng, depth - 1) for name in _names(rng)}
    return (rng.choice(_TEXTS), rng.choice([0, 3, 7, -2, 0.5, 2.5]), rng.choice([True, False]), None)[kind]


def likely_value(rng: random.Random, schema: Any, root: Any, depth: int = 4) -> Any:
    """A value that has a chance to be as a schema says."""
    if not isinstance(schema, dict) or depth == 0 or rng.random() < 0.1:
        return any_value(rng, 1)
    if "const" in schema or "enum" in schema:
        return schema["const"] if "const" in schema else rng.choice(schema["enum"])
    inner = [entry for word in ("anyOf", "oneOf", "allOf") for entry in schema.get(word, [])]
    if isinstance(target := root["$defs"].get(schema.get("$ref", "").rpartition("/")[2]), dict):
        inner.append(target)
    own = {"properties", "required", "items", "prefixItems"} & schema.keys()
    if inner and (not own or rng.random() < 0.3):
        return likely_value(rng, rng.choice(inner), root, depth - 1)
    if {"properties", "required"} & schema.keys() and schema.get("type") != "array":
        own_properties = schema.get("properties") or {}
        names = {*schema.get("required", []), *(name for name in own_properties if rng.random() < 0.6)}
        names |= set(rng.sample(_NAMES, rng.choice([0, 0, 1])))
        return {name: likely_value(rng, own_properties.get(name, True), root, depth - 1) for name in sorted(names)}
    if {"items", "prefixItems"} & schema.keys():
        items = schema.get("prefixItems", schema.get("items"))
        of = [*items] if isinstance(items, list) else [items] * rng.randrange(3)
        return [likely_value(rng, each, root, depth - 1) for each in of]
    return any_value(rng, 1)


def spellings(value: Any) -> Iterator[str]:
    """A value as JSON, with its members in every order."""
    if isinstance(value, dict):
        for order in permutations(sorted(value)):
            yield from (f"{{{text}}}" for text in _joined([(json.dumps(name) + ": ", value[name]) for name in order]))
    elif isinstance(value, list):
        yield from (f"[{text}]" for text in _joined([("", item) for item in value]))
    else:
        yield json.dumps(value, ensure_ascii=False)


def _joined(parts: list[tuple[str, Any]]) -> Iterator[str]:
    if not parts:
        yield ""
        return
    (before, first), *others = parts
    for text in spellings(first):
        for rest in _joined(others):
            yield f"{before}{text}{', ' if others else ''}{rest}"
