"""Calls that are no JSON objects: their guides are grammars, of which a format says what one call looks like."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvforge.gateway.languages.asked_forms import Calls
from kvforge.gateway.languages.call_reader import CallReader, with_token_marks
from kvforge.gateway.languages.call_steps import WrittenCall
from kvforge.gateway.languages.function import Function
from kvforge.gateway.languages.text_patterns import without
from kvforge.gateway.languages.tool_format import TEXT_RULE, ToolFormat, quoted
from kvforge.gateway.languages.written_format import TokenOf, spelled
from kvforge.runtime.requests.guided_decoding import GuidedDecoding

_GUIDED = {"type", "properties", "required", "additionalProperties", "$defs"}
"""Keywords that grammars keep to."""

Mark = Callable[[str], str]
"""A text with its markers as the answer has them."""


@dataclass(frozen=True)
class Speller:
    """Writes texts in which markers may be tokens as parts of a grammar's rule."""

    marks: tuple[str, ...]
    token_of: TokenOf

    def __call__(self, text: str) -> str:
        pieces = spelled(text, self.marks, self.token_of)
        return " ".join(f"<[{piece}]>" if isinstance(piece, int) else quoted(piece) for piece in pieces)

    def text_before(self, rule: str, mark: str, terms: Sequence[str] = ()) -> tuple[str, list[str]]:
        """What matches any text, or one that matches all `terms`, and the mark that ends it, and the rules that it
        needs, whose names begin with `rule`."""
        token = self.token_of(mark) if mark in self.marks else None
        if token is not None and terms:
            return f"{rule.upper()} <[{token}]>", [f"{rule.upper()}: {' & '.join(terms)}"]
        if token is not None:
            return f"TEXT <[{token}]>", []
        # A text ends at the first mark, as readers have it.
        text = f"({' & '.join((*terms, without(mark)))})" if terms else "TEXT"
        return rule, [f"{rule}[lazy]: {text} {quoted(mark)}"]


@dataclass(frozen=True)
class GrammarFormat(ToolFormat):
    """Attributes:
    marks: the markers.
    wraps: what stands before the first call and after the last one.
    joins: what stands between calls.
    gap: what stands between the mark that begins a call and the call.
    """

    marks: tuple[str, ...] = ()
    wraps: tuple[str, str] = ("", "")
    joins: str = ""
    gap: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        return self.marks

    @property
    def prefix(self) -> str:
        return self.wraps[0] + self._begins

    @property
    def _begins(self) -> str:
        return self.notation.begins + self.gap

    def reader(self, asked: Calls) -> CallReader:
        def mark(text: str) -> str:
            return with_token_marks(text, asked.tokens)

        return CallReader(self.notation.with_tokens(asked.tokens), lambda: self.call(asked, mark), asked.forced)

    def call(self, asked: Calls, mark: Mark) -> WrittenCall:
        """What reads one call, behind the mark that begins it."""
        raise NotImplementedError

    def rules(self, function: Function, name: str, spell: Speller) -> list[str]:
        """The grammar's rule `name`, of one call from the gap behind the mark that begins it to its end, and those that
        it needs, whose names begin with it."""
        raise NotImplementedError

    def common_rules(self, spell: Speller) -> list[str]:
        """What the rules of all functions need."""
        return []

    def forced(self, functions: Sequence[Function], parallel: bool, token_of: TokenOf) -> GuidedDecoding:
        spell = Speller(self.marks, token_of)
        calls = f"start: {self._several(parallel, spell)} {spell(self.wraps[1])}"
        return self._grammar([calls], functions, spell)

    def free(self, functions: Sequence[Function], parallel: bool, token_of: TokenOf) -> GuidedDecoding:
        spell = Speller(self.marks, token_of)
        start = self.wraps[0] or self.notation.begins
        first = next((mark for mark in self.marks if start.startswith(mark)), start)
        begun, rules = spell.text_before("begun", first)
        rest = spell(self.prefix.removeprefix(first))
        if self.wraps[0]:
            calls = f"calls: {begun} {rest} {self._several(parallel, spell)} {spell(self.wraps[1])}"
            return self._grammar(["start: TEXT | calls", calls, *rules], functions, spell)
        start = f"start: (call){'*' if parallel else '?'} TEXT"
        return self._grammar([start, f"call: {begun} {rest} one", *rules], functions, spell)

    def _several(self, parallel: bool, spell: Speller) -> str:
        return f"one ({spell(self.joins + self._begins)} one)*" if parallel else "one"

    def _grammar(self, rules: list[str], functions: Sequence[Function], spell: Speller) -> GuidedDecoding:
        one = "one: " + " | ".join(f"call_{index}" for index in range(len(functions)))
        bodies = [rule for index, entry in enumerate(functions) for rule in self.rules(entry, f"call_{index}", spell)]
        lines = [TEXT_RULE, *rules, one, *bodies, *self.common_rules(spell)]
        return GuidedDecoding("ebnf_grammar", "\n".join(lines) + "\n")


def said_together(schema: Mapping[str, Any], in_place: Collection[str]) -> set[str]:
    """The keywords of a schema that a grammar does not keep to which has a place for the properties `in_place`: what is
    said of arguments together, of those without a place, and of those that the schema does not name."""
    found = set(schema) - _GUIDED
    if isinstance(schema.get("additionalProperties", True), dict) and schema["additionalProperties"]:
        found.add("additionalProperties")
    return found | ({"required"} if set(schema.get("required", ())) - set(in_place) else set())


def in_order(name: str, steps: Sequence[tuple[str, bool]], other: str | None, joint: str) -> list[str]:
    """Rules of steps with `joint` between them, of which those that are not needed may lack, and of any number of the
    rule `other` behind them: `name`_first from the first one on, `name`_then_N from step N on, behind others."""
    others = f"{other} ({quoted(joint)} {other})*"
    last = '""' if other is None else f"({others})?"
    behind_all = '""' if other is None else f"({quoted(joint)} {others})?"
    rules = [f"{name}_then_{len(steps)}: {behind_all}"]
    firsts = []
    for index, (step, is_needed) in enumerate(steps):
        behind = f"{name}_then_{index + 1}"
        rules.append(f"{name}_then_{index}: {quoted(joint)} {step} {behind}" + ("" if is_needed else f" | {behind}"))
        if all(not needed for _, needed in steps[:index]):
            firsts.append(f"{step} {behind}")
    if all(not needed for _, needed in steps):
        firsts.append(last)
    return [f"{name}_first: " + " | ".join(firsts), *rules]
