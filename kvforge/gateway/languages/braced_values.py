"""Rules of a grammar for values that are JSON but for names without quotation marks and texts between marks."""

import json
import re
from typing import Any

from kvforge.gateway.languages.argument_values import ANY_TYPE
from kvforge.gateway.languages.grammar_format import Speller, in_order
from kvforge.gateway.languages.schema_relaxing import target
from kvforge.gateway.languages.text_patterns import KEYWORDS, text_terms
from kvforge.gateway.languages.tool_format import with_whitespace

ANY = "any"
PAIR = "any_pair"
_KEY = r'[A-Za-z0-9_$.@-]([^:{}\[\],<>\n"]*[^:{}\[\],<>\n" ])?'
_SCALARS = ("number", "boolean", "null")
_OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_OF_OBJECTS = ("properties", "required", "additionalProperties")
_CHOICES = ("enum", "const", "anyOf", "$ref")
"""Keywords of which one says which values there are, and what stands beside it is not kept."""
_KEPT = {"type", "$defs", "definitions", "items", *_OF_NUMBERS, *_OF_OBJECTS, *KEYWORDS}


def any_rules(spell: Speller, quote: str) -> list[str]:
    """The rules ANY, of any value, and PAIR, of one with a name, and those that they need."""
    ended, rules = spell.text_before("quoted", quote)
    scalar = with_whitespace({"type": list(_SCALARS)})
    return [
        f'{ANY}: text | %json {scalar} | "[" ({ANY} ("," {ANY})*)? "]" | "{{" ({PAIR} ("," {PAIR})*)? "}}"',
        f'{PAIR}: /{_KEY}/ ":" {ANY}',
        f"text: {spell(quote)} {ended}",
        *rules,
    ]


class BracedValues:
    """Makes rules, whose names begin with `name`, for the values of schemas inside `root`. Members of objects come in
    the order of their names in small letters, as templates write them, others behind them.

    Attributes:
        rules: those made so far.
        left: the keywords that they do not keep.
    """

    def __init__(self, name: str, root: Any, spell: Speller, quote: str) -> None:
        self._name, self._root, self._spell, self._quote = name, root, spell, quote
        self._references: dict[str, str] = {}
        self._num_rules = 0
        self.rules: list[str] = []
        self.left: set[str] = set()

    def object_of(self, schema: dict[str, Any]) -> str:
        """The rule of an object's members, between its braces."""
        self._leave(set(schema) - _KEPT)
        properties = schema.get("properties", {})
        required = set(schema.get("required", ()))
        said = {key: part for key, part in properties.items() if part is not False and re.fullmatch(_KEY, key)}
        self._leave({"required"} if required - said.keys() else ())
        name = self._new("members")
        steps = []
        for key in sorted(said, key=str.lower):
            rule = self._new("member")
            self.rules.append(f"{rule}: {self._spell(key + ':')} ({self._value(said[key])})")
            steps.append((rule, key in required))
        others = schema.get("additionalProperties", True)
        other = PAIR
        if others is not False and (properties or others not in (True, {})):
            other = self._new("other")
            names = "|".join(map(_literal, properties))
            self.rules.append(f"{other.upper()}: /{_KEY}/" + (f" & ~/{names}/" if names else ""))
            self.rules.append(f'{other}: {other.upper()} ":" ({self._value(others)})')
        self.rules += in_order(name, steps, None if others is False else other, ",")
        return f"{name}_first"

    def _value(self, schema: Any) -> str:
        """What matches a value, in a grammar."""
        if not isinstance(schema, dict) or not schema:
            return ANY
        choice = next((key for key in _CHOICES if key in schema), None)
        if choice is not None:
            self._leave(set(schema) - {choice, "type"})
            return self._chosen(choice, schema)
        self._leave(set(schema) - _KEPT)
        kinds = schema.get("type", sorted(ANY_TYPE))
        return " | ".join(self._of_type(kind, schema) for kind in (kinds if isinstance(kinds, list) else [kinds]))

    def _chosen(self, choice: str, schema: dict[str, Any]) -> str:
        given = schema[choice]
        if choice == "anyOf":
            return " | ".join(self._value(entry) for entry in given)
        if choice != "$ref":
            texts = [text for value in (given if choice == "enum" else [given]) if (text := self._written(value))]
            self._leave(() if texts else {choice})
            return " | ".join(map(self._spell, texts)) or ANY
        if given not in self._references:
            self._references[given] = self._new("named")
            self.rules.append(f"{self._references[given]}: {self._value(target(self._root, given))}")
        return self._references[given]

    def _of_type(self, kind: str, schema: dict[str, Any]) -> str:
        if kind == "string":
            return self._text(schema)
        if kind == "object":
            return f'"{{" {self.object_of({key: schema[key] for key in _OF_OBJECTS if key in schema})} "}}"'
        if kind == "array":
            item = self._new("item")
            self.rules.append(f"{item}: {self._value(schema.get('items', {}))}")
            return f'"[" ({item} ("," {item})*)? "]"'
        limits = {key: schema[key] for key in _OF_NUMBERS if key in schema}
        return f"%json {with_whitespace({'type': kind, **limits})}"

    def _text(self, schema: dict[str, Any]) -> str:
        terms, left = text_terms(schema)
        self._leave(left)
        if not terms:
            return "text"
        text, needed = self._spell.text_before(self._new("text"), self._quote, terms)
        self.rules += needed
        return f"{self._spell(self._quote)} {text}"

    def _written(self, value: Any) -> str:
        """A value in this notation; empty where it cannot be said."""
        if isinstance(value, str):
            return "" if self._quote in value else self._quote + value + self._quote
        if isinstance(value, list):
            parts = [self._written(entry) for entry in value]
            return f"[{','.join(parts)}]" if all(parts) else ""
        if isinstance(value, dict):
            pairs = [(key, self._written(value[key])) for key in sorted(value, key=str.lower)]
            is_said = all(text and re.fullmatch(_KEY, key) for key, text in pairs)
            return "{" + ",".join(f"{key}:{text}" for key, text in pairs) + "}" if is_said else ""
        return json.dumps(value)

    def _leave(self, keywords: Any) -> None:
        self.left |= set(keywords)

    def _new(self, kind: str) -> str:
        self._num_rules += 1
        return f"{self._name}_{kind}_{self._num_rules}"


def _literal(text: str) -> str:
    """A regular expression of a text, inside slashes."""
    return re.sub(r"([\\.+*?()|\[\]{}^$/&~#-])", r"\\\1", text)
