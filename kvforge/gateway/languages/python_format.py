"""Calls in Python's notation."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvforge.gateway.languages.asked_forms import Calls
from kvforge.gateway.languages.call_steps import WrittenCall
from kvforge.gateway.languages.function import Function
from kvforge.gateway.languages.grammar_format import GrammarFormat, Mark, Speller, in_order, said_together
from kvforge.gateway.languages.python_call import PythonCall
from kvforge.gateway.languages.schema_relaxing import hoisted, with_definitions
from kvforge.gateway.languages.tool_format import quoted, with_whitespace
from kvforge.gateway.languages.written_format import TokenOf
from kvforge.runtime.requests.guided_decoding import GuidedDecoding


@dataclass(frozen=True)
class PythonFormat(GrammarFormat):
    """Attributes:
    ends: what stands behind a call's bracket.
    """

    ends: str = ""

    def call(self, asked: Calls, mark: Mark) -> WrittenCall:
        return PythonCall(frozenset(asked.types))

    def unguided(self, function: Function) -> Collection[str]:
        """As ToolFormat: what is said of arguments together, and of those without a place in `properties`."""
        names = {key for key in function.parameters.get("properties", {}) if _is_name(key)}
        return said_together(function.parameters, names)

    def rules(self, function: Function, name: str, spell: Speller) -> list[str]:
        """As GrammarFormat. Arguments come in the schema's order, others behind them."""
        rest = name.replace("call", "rest")
        schema, definitions = hoisted(function.parameters)
        found = []
        steps: list[tuple[str, bool]] = []
        for key, part in schema.get("properties", {}).items():
            if part is not False and _is_name(key):
                rule = f"{name}_{len(steps)}"
                steps.append((rule, key in schema.get("required", ())))
                value = with_whitespace(with_definitions(part, definitions) if isinstance(part, dict) else {})
                found.append(f"{rule}: {quoted(key + '=')} %json {value}")
        is_open = schema.get("additionalProperties", True) is not False
        return [
            f"{name}: {quoted(function.name + '(')} {rest}",
            f"{rest}: {name}_first {quoted(')' + self.ends)}",
            *found,
            *in_order(name, steps, "other" if is_open else None, ", "),
        ]

    def common_rules(self, spell: Speller) -> list[str]:
        """As GrammarFormat: an argument that no schema speaks of."""
        return [f'other: /[A-Za-z_][A-Za-z0-9_]*/ "=" %json {with_whitespace({})}']


@dataclass(frozen=True)
class PythonListFormat(PythonFormat):
    """A list of calls has no mark of its own: in free text a guide knows one by its beginning, as far as the first
    call's bracket."""

    def free(self, functions: Sequence[Function], parallel: bool, token_of: TokenOf) -> GuidedDecoding:
        spell = Speller(self.marks, token_of)
        more = f"({spell(self.joins)} one)*" if parallel else ""
        begun = [
            f"begun_{i}[lazy]: TEXT {quoted(self.notation.begins + f.name + '(')}" for i, f in enumerate(functions)
        ]
        first = " | ".join(f"begun_{index} rest_{index}" for index in range(len(functions)))
        calls = f"calls: ({first}) {more} {spell(self.wraps[1])}"
        return self._grammar(["start: TEXT | calls", calls, *begun], functions, spell)

    def _several(self, parallel: bool, spell: Speller) -> str:
        return f"one ({spell(self.joins)} one)*" if parallel else "one"


def _is_name(key: str) -> bool:
    return key.isidentifier()
