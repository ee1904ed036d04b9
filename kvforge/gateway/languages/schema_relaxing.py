"""What of a schema a guide can keep, where it cannot keep all of it.

The relaxed schema allows every value that the given one does: a keyword is left out alone only where that forbids
nothing more, and else with those that depend on it.
"""

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from kvforge.gateway.languages.schemas import mapped

TRIED, TRIED_BYTES, TRY_BYTES = 32, 1 << 16, 200
"""Bytes of all schemas that are tried on the way from one to what is kept of it, for each of its own and besides; and
what a try counts for besides its bytes. A byte takes some 2 µs."""
MAX_REMEMBERED = 256
ANY_OBJECT: dict[str, Any] = {"type": "object"}
ALL = "*"
"""Stands for all of a schema among its keywords."""
_OBJECT = ("properties", "patternProperties", "additionalProperties")
_ARRAY = ("prefixItems", "items")
_GROUPS = (_OBJECT, _ARRAY, ("contains", "minContains", "maxContains"))
_UNEVALUATED = {"unevaluatedProperties", "unevaluatedItems"}
"""What these forbid grows with all that is left out beside them."""
_SCHEMAS = (*_OBJECT, *_ARRAY, "anyOf", "oneOf", "allOf")
"""Keywords whose schemas may allow more, and the schema that has them then allows more, too."""
_FIRST = ("type", "const", "enum", "$ref", *_OBJECT, "required", *_ARRAY, "anyOf", "oneOf", "allOf")
_DEFINITIONS = ("$defs", "definitions")

Definitions = Mapping[str, Any]


@dataclass(frozen=True)
class Relaxed:
    """A schema of objects that a guide can keep, and the keywords that it does not keep of the one that was given."""

    schema: dict[str, Any]
    left: tuple[str, ...]


def relaxed(schema: dict[str, Any]) -> Relaxed:
    """What can be kept of a schema of objects. The result is shared: do not change it."""
    return _relaxed(json.dumps(schema))


@functools.lru_cache(MAX_REMEMBERED)
def _relaxed(text: str) -> Relaxed:
    schema = json.loads(text)
    trial = _Trial(TRIED * len(text) + TRIED_BYTES)
    try:
        return Relaxed(schema, ()) if trial.passes(schema, {}) else _Relaxing(trial, schema).result()
    except (_Exhausted, RecursionError):
        return Relaxed(ANY_OBJECT, (ALL,))


class _Exhausted(Exception):
    """Too much was tried."""


class _Trial:
    """Asks whether guides can be made of schemas, of `num_bytes` in all."""

    def __init__(self, num_bytes: int) -> None:
        from kvforge.runtime.guides.schema_check import schema_problem

        self._problem = schema_problem
        self._num_bytes = num_bytes

    def passes(self, schema: Any, definitions: Definitions) -> bool:
        """Whether a guide can be made of a schema that refers to these definitions."""
        if not isinstance(schema, dict) or not schema:
            return True
        whole = with_definitions(schema, definitions)
        self._num_bytes -= len(json.dumps(whole)) + TRY_BYTES
        if self._num_bytes < 0:
            raise _Exhausted
        return self._problem(whole) is None


class _Relaxing:
    """One schema on its way; what it refers to stands in definitions of their own."""

    def __init__(self, trial: _Trial, schema: dict[str, Any]) -> None:
        self._trial = trial
        self._left: set[str] = set()
        self._root, self._definitions = hoisted(schema)

    def result(self) -> Relaxed:
        """Each definition is made to pass by itself first, then with those that it refers to."""
        anything: Definitions = {name: {} for name in self._definitions}
        for name, part in self._definitions.items():
            self._definitions[name] = self._part(part, anything)
        for name in _inner_first(self._definitions):
            self._definitions[name] = self._part(self._definitions[name], self._definitions)
        root = self._part(self._root, self._definitions)
        root = {**(root if isinstance(root, dict) else {}), "type": "object"}
        if not self._trial.passes(root, self._definitions):
            return Relaxed(ANY_OBJECT, (ALL,))
        return Relaxed(with_definitions(root, self._definitions), tuple(sorted(self._left)))

    def _part(self, schema: Any, definitions: Definitions) -> Any:
        """What passes of a schema inside the one that is relaxed."""
        if self._trial.passes(schema, definitions):
            return schema
        inner = mapped(schema, lambda inner: self._part(inner, definitions), _SCHEMAS)
        if inner.get("oneOf") != schema.get("oneOf"):  # of alternatives that allow more, a value may match two
            inner = _without_one_of(inner)
        if self._trial.passes(inner, definitions):
            return inner
        kept: dict[str, Any] = {}
        for choices in _choices(inner):
            found = {}
            if not choices[0].keys() & _UNEVALUATED:
                found = next((c for c in choices if self._trial.passes({**kept, **_added(kept, c)}, definitions)), {})
            kept.update(_added(kept, found))
            self._left |= choices[0].keys() - found.keys()
        return kept


def _choices(schema: Mapping[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """What to add to an empty schema, one after the other, to have this one; of each the tightest that passes."""
    for key in sorted(schema, key=lambda key: _FIRST.index(key) if key in _FIRST else len(_FIRST)):
        group = next((group for group in _GROUPS if key in group), (key,))
        present = [member for member in group if member in schema]
        whole = {member: schema[member] for member in present}
        if present[0] != key:
            continue
        if group in (_OBJECT, _ARRAY):
            # A member says what those before it leave: without its first, none is kept.
            yield [{member: schema[member] for member in present[:size]} for size in range(len(present), 0, -1)]
        elif key == "allOf" and isinstance(schema[key], list):
            yield from ([{"allOf": [entry]}] for entry in schema[key])
        elif key == "oneOf":
            yield [whole, {"allOf": [_without_one_of(whole)]}]
        else:
            yield [whole]


def _without_one_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema that is content with one or more of the alternatives."""
    others = {key: value for key, value in schema.items() if key != "oneOf"}
    entries = others["allOf"] if isinstance(others.get("allOf"), list) else []
    return {**others, "allOf": [*entries, {"anyOf": schema["oneOf"]}]}


def _added(schema: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """What ``more`` becomes in a schema that may have entries of allOf already."""
    return {**more, "allOf": [*schema["allOf"], *more["allOf"]]} if "allOf" in more and "allOf" in schema else {**more}


def hoisted(schema: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The schema without definitions, and whatever it refers to by name."""
    names: dict[str, str] = {}
    found: dict[str, Any] = {}

    def renamed(part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        own = mapped({key: value for key, value in part.items() if key not in _DEFINITIONS}, renamed)
        reference = part.get("$ref")
        if isinstance(reference, str):
            named = target(schema, reference)
            if named is not None and reference not in names:
                names[reference] = f"d{len(names)}"
                found[names[reference]] = renamed(named)
            own["$ref"] = f"#/$defs/{names[reference]}" if named is not None else reference
        return own

    return renamed(schema), found


def target(schema: Any, reference: str) -> Any:
    """What a reference names; None where that is no schema of this one."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    found = schema
    for part in unquote(reference).split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and part.isdecimal() and int(part) < len(found):
            found = found[int(part)]
        elif isinstance(found, dict) and part in found:
            found = found[part]
        else:
            return None
    return found if isinstance(found, dict | bool) else None


def with_definitions(schema: dict[str, Any], definitions: Definitions) -> dict[str, Any]:
    """A schema with those definitions that it needs."""
    needed: dict[str, Any] = {}
    pending = _names_in(schema)
    while pending:
        name = pending.pop()
        if name not in needed and name in definitions:
            needed[name] = definitions[name]
            pending += _names_in(definitions[name])
    return {**schema, "$defs": needed} if needed else schema


def _inner_first(definitions: Definitions) -> list[str]:
    """The names in an order in which, but for circles, what a definition refers to comes before it."""
    ordered: dict[str, None] = {}
    open_ones: set[str] = set()

    def visit(name: str) -> None:
        if name in definitions and name not in open_ones:
            open_ones.add(name)
            for inner in _names_in(definitions[name]):
                visit(inner)
            ordered[name] = None

    for name in definitions:
        visit(name)
    return list(ordered)


def _names_in(schema: Any) -> list[str]:
    """The definitions that a schema refers to."""
    names: list[str] = []

    def look(part: Any) -> Any:
        if isinstance(part, dict):
            reference = part.get("$ref")
            names.extend([reference.removeprefix("#/$defs/")] if isinstance(reference, str) else [])
            mapped(part, look)
        return part

    look(schema)
    return names
