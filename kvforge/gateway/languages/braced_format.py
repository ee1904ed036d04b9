"""Calls whose arguments are JSON but for names without quotation marks and texts between marks."""

from collections.abc import Collection
from dataclasses import dataclass

from kvforge.gateway.languages.asked_forms import Calls
from kvforge.gateway.languages.braced_call import BracedCall
from kvforge.gateway.languages.braced_values import BracedValues, any_rules
from kvforge.gateway.languages.call_steps import WrittenCall
from kvforge.gateway.languages.function import Function
from kvforge.gateway.languages.grammar_format import GrammarFormat, Mark, Speller


@dataclass(frozen=True)
class BracedFormat(GrammarFormat):
    """Attributes:
    quote: what stands around texts.
    """

    quote: str = '"'

    def call(self, asked: Calls, mark: Mark) -> WrittenCall:
        return BracedCall(mark(self.gap), mark(self.quote), asked.types)

    def unguided(self, function: Function) -> Collection[str]:
        """As ToolFormat: what is said of the number of members and beside a choice, and of texts where it is no
        expression of a grammar."""
        values = BracedValues("call", function.parameters, Speller((), lambda text: None), self.quote)
        values.object_of(function.parameters)
        return values.left

    def rules(self, function: Function, name: str, spell: Speller) -> list[str]:
        values = BracedValues(name, function.parameters, spell, self.quote)
        members = values.object_of(function.parameters)
        begins, ends = spell(function.name + "{"), spell("}" + self.notation.closes)
        return [f"{name}: {begins} {members} {ends}", *values.rules]

    def common_rules(self, spell: Speller) -> list[str]:
        """As GrammarFormat: any value."""
        return any_rules(spell, self.quote)
