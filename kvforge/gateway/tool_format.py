"""What a written format of tool calls consists of; kvforge.gateway.tool_formats has one file for each."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvforge.gateway.call_reader import Notation
from kvforge.gateway.functions import Function
from kvforge.gateway.schemas import moved
from kvforge.gateway.written_format import WrittenFormat
from kvforge.runtime.requests.guided_decoding import GuidedDecoding

_WHITESPACE = {"x-guidance": {"whitespace_pattern": r" |\r?\n[ \t]{0,32}"}}

TokenOf = Callable[[str], int | None]
"""The id of a marker that is one token, which no other tokens may write; None where it is plain text."""


def _same(call_id: str) -> str:
    return call_id


@dataclass(frozen=True)
class ToolFormat(WrittenFormat):
    """How a family of models writes calls.

    Attributes:
        notation: how calls are marked, which is how they are read.
        key: the member of a call that holds its arguments.
        gap: what stands between the notation's marks and the object.
        template_id: a call's id as the chat template takes it.
    """

    notation: Notation
    key: str = "arguments"
    gap: str = ""
    template_id: Callable[[str], str] = _same

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens and must be seen all the same."""
        notation = self.notation
        own = () if notation.is_object or notation.opens else (notation.closes,)
        return (*(() if notation.is_object else (notation.begins,)), *own, *notation.ignored)

    @property
    def prefix(self) -> str:
        """What an answer that must be a call begins with: it is put at the end of the prompt."""
        if self.notation.is_object:
            return ""
        return self.notation.begins + (self.gap if not self.notation.opens else "")

    def forced(self, functions: Sequence[Function], parallel: bool) -> GuidedDecoding:
        """After the prefix, calls of these functions and nothing else. Raises RequestError."""
        return GuidedDecoding("json_schema", self._calls(functions, parallel))  # type: ignore[arg-type]

    def free(self, functions: Sequence[Function], parallel: bool, token_of: TokenOf) -> GuidedDecoding:
        """Any text, and in it calls of these functions. Raises RequestError."""
        token = None if self.notation.is_object else token_of(self.notation.begins)
        if token is None:
            return self._tags(functions)
        end = token_of(self.notation.closes)
        rules = ["TEXT: /(.|\\n)*/"]
        if self.notation.opens:
            calls = _json(self._calls(functions, parallel))
            rules += ["start: TEXT | calls", f'calls: TEXT <[{token}]> " "? %json {calls}']
        else:
            rules += [f"start: (call){'*' if parallel else '?'} TEXT"]
            rules += ["call: " + " | ".join(f"call_{index}" for index in range(len(functions)))]
            closes = _quoted(self.notation.closes) if end is None else f"<[{end}]>"
            for index, function in enumerate(functions):
                begin, rest = _quoted(self.gap + self.head(function.name)), _quoted("}" + self.gap)
                schema = _json(function.parameters)
                rules += [f"call_{index}: TEXT <[{token}]> {begin} %json {schema} {rest} {closes}"]
        return GuidedDecoding("ebnf_grammar", "\n".join(rules) + "\n")

    def _tags(self, functions: Sequence[Function]) -> GuidedDecoding:
        notation = self.notation
        structures = []
        for function in functions:
            before = "" if notation.is_object else notation.begins + self.gap + notation.opens
            after = "" if notation.is_object else self.gap * (not notation.opens) + notation.closes
            schema = {**function.parameters, **_WHITESPACE}
            structures.append({"begin": before + self.head(function.name), "schema": schema, "end": "}" + after})
        triggers = [item["begin"] for item in structures] if notation.is_object else [notation.begins]
        tag = {"triggers": triggers, "structures": structures}
        return GuidedDecoding("structural_tag", tag)  # type: ignore[arg-type]

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


def _json(schema: dict[str, Any]) -> str:
    """A schema inside a grammar."""
    return json.dumps({**schema, **_WHITESPACE}, ensure_ascii=False)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
