"""JSON schemas of functions' parameters, made ready to stand inside another schema or a grammar."""

from collections.abc import Callable, Mapping
from typing import Any

_ANNOTATIONS = frozenset({"title", "description", "examples", "default", "$comment", "$schema"})
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains",
           "propertyNames", "unevaluatedItems", "unevaluatedProperties")  # fmt: skip


def bare(schema: Any) -> Any:
    """A schema without what only people read."""
    if not isinstance(schema, dict):
        return schema
    return _mapped({key: value for key, value in schema.items() if key not in _ANNOTATIONS}, bare)


def moved(schema: Any, pointer: str) -> Any:
    """A schema whose own root stands at `pointer` (#/...) of another one: its references say so."""
    if not isinstance(schema, dict):
        return schema
    result = _mapped(schema, lambda inner: moved(inner, pointer))
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        result["$ref"] = pointer + reference[1:]
    return result


def _mapped(schema: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """The same schema with every schema directly inside it changed."""
    result = dict(schema)
    for key in _MAPS:
        if isinstance(result.get(key), dict):
            result[key] = {name: change(inner) for name, inner in result[key].items()}
    for key in _LISTS:
        if isinstance(result.get(key), list):
            result[key] = [change(inner) for inner in result[key]]
    for key in _SINGLE:
        value = result.get(key)
        if isinstance(value, dict):
            result[key] = change(value)
        elif isinstance(value, list):
            result[key] = [change(inner) for inner in value]
    return result
