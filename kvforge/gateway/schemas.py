"""JSON schemas of functions' parameters, made ready to stand inside another schema or a grammar."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvforge.common.errors import RequestError

MAX_INLINED = 10_000
"""Schemas that a request's schemas may consist of together, once their references are written out."""
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


def inlined(schema: Mapping[str, Any], budget: Iterator[int]) -> Any:
    """A schema with what its references name in their place; each schema in it takes one of `budget`, which is
    `iter(range(MAX_INLINED))` for all of a request's. Raises RequestError where they name nothing, or name each other
    in a circle."""

    def write_out(part: Any, open_ones: tuple[str, ...]) -> Any:
        if next(budget, None) is None:
            raise RequestError("their references stand for too much; use fewer")
        if not isinstance(part, dict):
            return part
        others = {key: value for key, value in part.items() if key not in ("$ref", "$defs", "definitions")}
        others = _mapped(others, lambda inner: write_out(inner, open_ones))
        reference = part.get("$ref")
        if not isinstance(reference, str):
            return others
        if reference in open_ones:
            raise RequestError("their references form a circle")
        target = write_out(_found(schema, reference), (*open_ones, reference))
        return {"allOf": [target, others]} if others else target

    return write_out(schema, ())


def _found(schema: Any, reference: str) -> Any:
    """What a reference names."""
    found = schema
    for part in reference.removeprefix("#").split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, dict) or part not in found:
            raise RequestError(f"they have no {json.dumps(reference[:80])}")
        found = found[part]
    if not reference.startswith("#"):
        raise RequestError(f"they have no {json.dumps(reference[:80])}")
    return found


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
