"""Calls whose arguments stand between marks, texts as they are and all other values as JSON."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from kvforge.gateway.languages.argument_values import MAX_DEPTH, TEXT, types_of
from kvforge.gateway.languages.asked_forms import Calls
from kvforge.gateway.languages.call_steps import WrittenCall
from kvforge.gateway.languages.function import Function
from kvforge.gateway.languages.grammar_format import GrammarFormat, Mark, Speller, said_together
from kvforge.gateway.languages.schema_relaxing import hoisted, target, with_definitions
from kvforge.gateway.languages.tagged_call import TaggedCall, Tags
from kvforge.gateway.languages.text_patterns import KEYWORDS, text_terms
from kvforge.gateway.languages.tool_format import quoted, with_whitespace


@dataclass(frozen=True)
class TaggedFormat(GrammarFormat):
    """Attributes:
    tags: the marks.
    """

    tags: Tags = field(kw_only=True)

    def call(self, asked: Calls, mark: Mark) -> WrittenCall:
        return TaggedCall(self.tags.marked(mark), asked.types, mark(self.notation.closes))

    def unguided(self, function: Function) -> Collection[str]:
        """As ToolFormat: what is said of arguments together, and of texts where it is no expression of a grammar."""
        schema = function.parameters
        properties = schema.get("properties", {})
        found = said_together(schema, {key for key in properties if self._can_be_said(key)})
        for part in (_named(part, schema) for part in properties.values()):
            if _is_only_text(part):
                found |= text_terms(part)[1]
            elif _is_text(part, schema) and not _is_any_text(part):
                found |= part.keys() - {"type"}
        return found

    def rules(self, function: Function, name: str, spell: Speller) -> list[str]:
        """As GrammarFormat. Arguments come in the schema's order, others behind them."""
        tags = self.tags
        schema, definitions = hoisted(function.parameters)
        found: list[str] = []
        parts: list[str] = []
        for key, part in schema.get("properties", {}).items():
            if part is False or not self._can_be_said(key):
                continue
            rule = f"{name}_{len(parts)}"
            parts.append(rule if key in schema.get("required", ()) else f"{rule}?")
            begins = spell(f"{tags.key[0]}{key}{tags.key[1]}{self._opens}")
            said = _named(function.parameters["properties"][key], function.parameters)
            if choices := _texts(said):
                value = f"({' | '.join(map(quoted, choices))}) {spell(self._closes)}"
            elif _is_only_text(said) and (terms := text_terms(said)[0]):
                value, needed = spell.text_before(f"{rule}_text", self._closes, terms)
                found += needed
            elif _is_text(said, function.parameters):
                value = spell.text_before("ended", self._closes)[0]
            else:
                whole = with_definitions(part, definitions) if isinstance(part, dict) else {}
                value = f"%json {with_whitespace(whole)} {spell(self._closes)}"
            found.append(f'{rule}: {begins} {value} "\\n"')
        if schema.get("additionalProperties", True) is not False:
            parts.append("other*")
        begins = spell(f"{tags.name[0]}{function.name}{tags.name[1]}\n")
        ends = spell(f"{tags.ends}\n{self.notation.closes}" if tags.ends else self.notation.closes)
        return [f"{name}: {begins} {' '.join(parts)} {ends}", *found]

    def common_rules(self, spell: Speller) -> list[str]:
        """As GrammarFormat: an argument that no schema speaks of, and the end of a text."""
        ended, rules = spell.text_before("ended", self._closes)
        key, rest = spell(self.tags.key[0]), spell(self.tags.key[1] + self._opens)
        name = "[^" + "".join(sorted(self._not_in_names)).replace("\n", r"\n") + "]+"
        return [f'other: {key} /{name}/ {rest} {ended} "\\n"', *rules]

    @property
    def _opens(self) -> str:
        """What stands between the name of an argument and its value."""
        return "\n" + self.tags.value[0] if self.tags.breaks or self.tags.value[0] else ""

    @property
    def _not_in_names(self) -> set[str]:
        """Letters that no guided argument has in its name."""
        return {*"<>\n", *('"' if '"' in self.tags.key[1] else "")}

    def _can_be_said(self, key: str) -> bool:
        return bool(key) and not {*key} & self._not_in_names

    @property
    def _closes(self) -> str:
        """What stands behind a value."""
        return ("\n" if self.tags.breaks else "") + self.tags.value[1]


def _named(part: Any, schema: Any) -> Any:
    """What a schema refers to that says nothing else."""
    for _ in range(MAX_DEPTH):
        if not isinstance(part, dict) or part.keys() != {"$ref"}:
            break
        part = target(schema, part["$ref"])
    return part


def _texts(part: Any) -> list[str]:
    """The values of a schema that is a list of texts."""
    if not isinstance(part, dict) or not {"enum", "const"} & part.keys():
        return []
    values: list[Any] = part["enum"] if isinstance(part.get("enum"), list) else [part.get("const")]
    return values if all(isinstance(value, str) for value in values) else []


def _is_text(part: Any, schema: Any) -> bool:
    """Whether a value may be written without quotation marks, and so as anything."""
    return bool(types_of(part, schema, MAX_DEPTH) & TEXT) and not _texts(part)


def _is_only_text(part: Any) -> bool:
    """Whether a schema allows texts only, and says of them what expressions can say."""
    return isinstance(part, dict) and part.get("type") == "string" and part.keys() <= {"type", *KEYWORDS}


def _is_any_text(part: Any) -> bool:
    """Whether whatever is written is as the schema says, since it is read as a value of its types."""
    if not isinstance(part, dict) or not part:
        return True
    entries = [part] if "type" in part else part.get("anyOf", part.get("oneOf"))
    plain = isinstance(entries, list) and all(isinstance(e, dict) and e.keys() == {"type"} for e in entries)
    return len(part) == 1 and plain
