"""JSON schemas of functions' parameters, made ready to stand inside another schema or a grammar."""

from collections.abc import Callable, Collection, Mapping
from typing import Any
from urllib.parse import quote

_ANNOTATIONS = frozenset({"title", "description", "examples", "default", "$comment", "$schema", "$id", "x-guidance"})
"""What only people read, the address of a schema that stands elsewhere now, and what steers llguidance."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "propertyNames": ({}, True, {"type": "string"}), "uniqueItems": (False,), "dependentRequired": ({},),
    "dependentSchemas": ({},), "dependencies": ({},), "unevaluatedProperties": ({}, True),
    "unevaluatedItems": ({}, True), "not": (False,), "required": ([],),
}  # fmt: skip
"""Keywords that guides do not keep, and the values with which they ask for nothing."""
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains",
           "propertyNames", "unevaluatedItems", "unevaluatedProperties")  # fmt: skip


def bare(schema: Any) -> Any:
    """A schema of the same values without what says nothing of them, in the words of JSON Schema 2020-12 where there
    are words of its own for it."""
    if not isinstance(schema, dict):
        return schema
    if schema.get("not") in ({}, True):
        return False
    own = {key: value for key, value in schema.items() if key not in _ANNOTATIONS and not _says_nothing(schema, key)}
    if isinstance(own.get("items"), list):  # draft 7 and before
        own["prefixItems"] = own.pop("items")
        rest = own.pop("additionalItems", True)
        own.update({} if rest is True else {"items": rest})
    if isinstance(own.get("$ref"), str):
        own["$ref"] = quote(own["$ref"], safe="%/#~:?&=@!$'()*+,;")
    return mapped(own, bare)


def _says_nothing(schema: Mapping[str, Any], key: str) -> bool:
    """Whether a keyword allows every value that the others allow."""
    if schema[key] is None:
        return key != "const"
    if key in ("then", "else"):
        return "if" not in schema
    if key == "if":
        return "then" not in schema and "else" not in schema
    if key in ("minContains", "maxContains"):
        return "contains" not in schema
    if key == "additionalItems":
        return not isinstance(schema.get("items"), list)
    return key in _NEUTRAL and schema[key] in _NEUTRAL[key]


def moved(schema: Any, pointer: str) -> Any:
    """A schema whose own root stands at `pointer` (#/...) of another one: its references say so."""
    if not isinstance(schema, dict):
        return schema
    result = mapped(schema, lambda inner: moved(inner, pointer))
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        result["$ref"] = pointer + reference[1:]
    return result


def mapped(
    schema: Mapping[str, Any], change: Callable[[Any], Any], keys: Collection[str] | None = None
) -> dict[str, Any]:
    """The same schema with every schema directly inside it changed, or only those of these keywords."""
    result = dict(schema)
    for key in schema if keys is None else [key for key in schema if key in keys]:
        value = result[key]
        if key in _MAPS and isinstance(value, dict):
            result[key] = {name: change(inner) for name, inner in value.items()}
        elif key in _LISTS and isinstance(value, list):
            result[key] = [change(inner) for inner in value]
        elif key in _SINGLE:
            result[key] = change(value)
    return result
