"""Calls that are JSON objects with the function's name and its arguments."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvforge.gateway.languages.asked_forms import Calls
from kvforge.gateway.languages.call_object import CallObject
from kvforge.gateway.languages.call_reader import CallReader
from kvforge.gateway.languages.function import Function
from kvforge.gateway.languages.grammar_format import Speller
from kvforge.gateway.languages.schemas import moved
from kvforge.gateway.languages.tool_format import TEXT_RULE, WHITESPACE, ToolFormat, quoted, with_whitespace
from kvforge.gateway.languages.written_format import TokenOf
from kvforge.runtime.requests.guided_decoding import GuidedDecoding


@dataclass(frozen=True)
class ObjectFormat(ToolFormat):
    """Attributes:
    key: the member of a call that holds its arguments.
    gap: what stands between the notation's marks and the object.
    ends: what stands behind a list of calls.
    """

    key: str = "arguments"
    gap: str = ""
    ends: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        notation = self.notation
        own = () if notation.is_object or notation.opens else (notation.closes,)
        return (*(() if notation.is_object else (notation.begins,)), *own, *notation.also, *notation.ignored)

    @property
    def prefix(self) -> str:
        if self.notation.is_object:
            return ""
        return self.notation.begins + (self.gap if not self.notation.opens else "")

    def reader(self, asked: Calls) -> CallReader:
        """As ToolFormat. Where the guide knows calls by their beginning, only these are calls."""
        all_guided = asked.forced or self.notation.begins in asked.tokens
        heads = None if all_guided else {self.head(name): name for name in asked.types}
        names = frozenset(asked.types)
        notation = self.notation.with_tokens(asked.tokens)
        return CallReader(notation, lambda: CallObject(names, heads), asked.forced)

    def forced(self, functions: Sequence[Function], parallel: bool, token_of: TokenOf) -> GuidedDecoding:
        return GuidedDecoding("json_schema", self._calls(functions, parallel))  # type: ignore[arg-type]

    def free(self, functions: Sequence[Function], parallel: bool, token_of: TokenOf) -> GuidedDecoding:
        token = None if self.notation.is_object else token_of(self.notation.begins)
        if token is None:
            return self._tags(functions)
        rules = [TEXT_RULE]
        if self.notation.opens:
            calls, spell = with_whitespace(self._calls(functions, parallel)), Speller(self.markers, token_of)
            begun = [spell.text_before(f"begun_{index}", mark) for index, mark in enumerate(self._all_begins)]
            begins = " | ".join(text for text, _ in begun)
            rules += ["start: TEXT | calls", f'calls: ({begins}) " "? %json {calls} {spell(self.ends)}']
            rules += [rule for _, needed in begun for rule in needed]
            return GuidedDecoding("ebnf_grammar", "\n".join(rules) + "\n")
        end = token_of(self.notation.closes)
        closes = quoted(self.notation.closes) if end is None else f"<[{end}]>"
        rules += [f"start: (call){'*' if parallel else '?'} TEXT"]
        rules += ["call: " + " | ".join(f"call_{index}" for index in range(len(functions)))]
        for index, function in enumerate(functions):
            begin, rest = quoted(self.gap + self.head(function.name)), quoted("}" + self.gap)
            schema = with_whitespace(function.parameters)
            rules += [f"call_{index}: TEXT <[{token}]> {begin} %json {schema} {rest} {closes}"]
        return GuidedDecoding("ebnf_grammar", "\n".join(rules) + "\n")

    def _tags(self, functions: Sequence[Function]) -> GuidedDecoding:
        notation = self.notation
        befores = [""] if notation.is_object else [mark + self.gap + notation.opens for mark in self._all_begins]
        after = "" if notation.is_object else self.gap * (not notation.opens) + notation.closes + self.ends
        structures = [
            {"begin": before + self.head(f.name), "schema": {**f.parameters, **WHITESPACE}, "end": "}" + after}
            for before in befores
            for f in functions
        ]
        triggers = [item["begin"] for item in structures] if notation.is_object else [*self._all_begins]
        tag = {"triggers": triggers, "structures": structures}
        return GuidedDecoding("structural_tag", tag)  # type: ignore[arg-type]

    @property
    def _all_begins(self) -> tuple[str, ...]:
        return (self.notation.begins, *self.notation.also)

    def head(self, name: str) -> str:
        """How a call of the function begins where the guide knows calls by their beginning."""
        return f'{{"name": "{name}", "{self.key}": '

    def _calls(self, functions: Sequence[Function], parallel: bool) -> dict[str, Any]:
        """The schema of calls of these functions, without marks."""
        definitions = {f.name: moved(f.parameters, f"#/$defs/{f.name}") for f in functions}
        calls = [self._call(f, {"$ref": f"#/$defs/{f.name}"}) for f in functions]
        schema: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
        if self.notation.opens:
            schema = {"type": "array", "items": schema, "minItems": 1, **({} if parallel else {"maxItems": 1})}
        return {"$defs": definitions, **schema}

    def _call(self, function: Function, parameters: Any) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {"name": {"const": function.name}, self.key: parameters},
            "required": ["name", self.key],
            "additionalProperties": False,
        }
