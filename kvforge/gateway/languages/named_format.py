"""Calls that say the function's name and then its arguments as a JSON object."""

from collections.abc import Set
from dataclasses import dataclass

from kvforge.gateway.languages.asked_forms import Calls
from kvforge.gateway.languages.call_events import Arguments, CallBegins, Event
from kvforge.gateway.languages.call_steps import CallSteps, WrittenCall
from kvforge.gateway.languages.function import Function
from kvforge.gateway.languages.grammar_format import GrammarFormat, Mark, Speller
from kvforge.gateway.languages.json_end import JsonEnd
from kvforge.gateway.languages.tool_format import with_whitespace


class NamedCall(CallSteps):
    """`before` stands before the name, `after` before the arguments, and `id_mark` before an id between them that some
    models write. A call is certain once its arguments begin."""

    def __init__(self, names: Set[str], before: str, after: str, id_mark: str = "") -> None:
        super().__init__()
        self._names = names
        self._before, self._after = before, after
        self._marks = (after, id_mark) if id_mark else (after,)
        self._end = JsonEnd()
        self._step = self._start if before else self._called

    def _start(self, events: list[Event]) -> bool:
        return self._expect(self._before, self._called)

    def _called(self, events: list[Event]) -> bool:
        return self._expect_name(self._names, self._marked)

    def _marked(self, events: list[Event]) -> bool:
        found = self._literal(*self._marks)
        if not found:
            return False if found == "" else self._is_text()
        return self._go(self._open if found == self._after else self._id)

    def _id(self, events: list[Event]) -> bool:
        return False if self._name() is None else self._go(self._marked)

    def _open(self, events: list[Event]) -> bool:
        rest = self._held.lstrip()
        if not rest:
            return False
        if rest[0] != "{":
            return self._is_text()
        self._held, self.began = rest, True
        events.append(CallBegins(self._function))
        return self._go(self._arguments)

    def _arguments(self, events: list[Event]) -> bool:
        end = self._end.find(self._held)
        piece = self._take(len(self._held) if end < 0 else end)
        events += [Arguments(piece)] if piece else []
        self.ended = self.has_arguments = end >= 0
        return False


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
        return NamedCall(frozenset(asked.types), mark(self.before), mark(self.after.strip()), mark(self.id_mark))

    def rules(self, function: Function, name: str, spell: Speller) -> list[str]:
        arguments = with_whitespace(function.parameters)
        before, after = self.before + function.name, self.after
        head = f"{spell(before + self.id_mark)} /[0-9]+/ {spell(after)}" if self.numbered else spell(before + after)
        return [f"{name}: {head} %json {arguments} {spell(self.ends)}"]
