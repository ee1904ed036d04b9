"""Arguments of calls that are not written as JSON: which types a schema allows, and texts as values of these types."""

import ast
import json
from collections.abc import Collection
from typing import Any, NoReturn

from kvforge.gateway.languages.schema_relaxing import target

ANY_TYPE = frozenset({"string", "number", "boolean", "null", "array", "object"})
TEXT = frozenset({"string"})
MAX_DEPTH = 16
"""Of schemas in each other that are looked into."""


def types_of_members(schema: dict[str, Any]) -> dict[str, list[str]]:
    """The types that each property of a schema may have; integers are numbers."""
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return {}
    return {name: sorted(types_of(part, schema, MAX_DEPTH)) for name, part in properties.items()}


def types_of(schema: Any, root: Any, depth: int) -> frozenset[str]:
    """The types of the values that a schema may allow; its references are into `root`."""
    if not isinstance(schema, dict) or depth == 0:
        return ANY_TYPE
    found = ANY_TYPE
    if "type" in schema:
        kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        found &= {"number" if kind == "integer" else kind for kind in kinds if isinstance(kind, str)}
    for key in ("const", "enum"):
        if key in schema:
            values = schema[key] if key == "enum" and isinstance(schema[key], list) else [schema[key]]
            found &= {_type(value) for value in values}
    if isinstance(schema.get("$ref"), str):
        found &= types_of(target(root, schema["$ref"]), root, depth - 1)
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            found &= frozenset().union(*(types_of(entry, root, depth - 1) for entry in schema[key]))
    for entry in schema["allOf"] if isinstance(schema.get("allOf"), list) else []:
        found &= types_of(entry, root, depth - 1)
    return found or ANY_TYPE


def json_of(text: str, types: Collection[str] = ANY_TYPE) -> str:
    """A value as JSON that is written as JSON or Python writes it, or a text without quotation marks where it is no
    such value of one of the types."""
    for read in (_json, _python):
        try:
            value, written = read(text.strip())
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
        if not isinstance(value, str) and (_type(value) in types or "string" not in types):
            return written
    return json.dumps(text, ensure_ascii=False)


def literal_of(text: str) -> str:
    """As json_of, of a text that has quotation marks where it is a string."""
    for read in (_json, _python):
        try:
            return read(text.strip())[1]
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
    return json.dumps(text.strip(), ensure_ascii=False)


def _json(text: str) -> tuple[Any, str]:
    return json.loads(text, parse_constant=_refuse), text


def _python(text: str) -> tuple[Any, str]:
    value = ast.literal_eval(text)
    return value, json.dumps(value, ensure_ascii=False, allow_nan=False)


def _refuse(name: str) -> NoReturn:
    raise ValueError(name)


def _type(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    kinds = {str: "string", int: "number", float: "number", list: "array", tuple: "array", dict: "object"}
    return kinds.get(type(value), "null")
