"""Calls that say the function's name and then its arguments as a JSON object."""

from dataclasses import dataclass

from kvforge.gateway.languages.asked_forms import Calls
from kvforge.gateway.languages.call_steps import WrittenCall
from kvforge.gateway.languages.function import Function
from kvforge.gateway.languages.grammar_format import GrammarFormat, Mark, Speller
from kvforge.gateway.languages.named_call import NamedCall
from kvforge.gateway.languages.tool_format import with_whitespace


@dataclass(frozen=True)
class NamedFormat(GrammarFormat):
    """Attributes:
    before, after: what stands before the name, and between it and the arguments.
    ends: what stands behind the arguments.
    id_mark: what may stand between the name and `after`, with an id.
    numbered: an id is there in any case, and is a number.
    """

    before: str = ""
    after: str = ""
    ends: str = ""
    id_mark: str = ""
    numbered: bool = False

    def call(self, asked: Calls, mark: Mark) -> WrittenCall:
        """As GrammarFormat."""
        return NamedCall(frozenset(asked.types), mark(self.before), mark(self.after.strip()), mark(self.id_mark))

    def rules(self, function: Function, name: str, spell: Speller) -> list[str]:
        """As GrammarFormat."""
        arguments = with_whitespace(function.parameters)
        before, after = self.before + function.name, self.after
        head = f"{spell(before + self.id_mark)} /[0-9]+/ {spell(after)}" if self.numbered else spell(before + after)
        return [f"{name}: {head} %json {arguments} {spell(self.ends)}"]
