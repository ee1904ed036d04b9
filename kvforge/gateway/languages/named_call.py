"""One call that says the function's name and then its arguments as a JSON object."""

from collections.abc import Set

from kvforge.gateway.languages.call_events import Arguments, CallBegins, Event
from kvforge.gateway.languages.call_steps import CallSteps
from kvforge.gateway.languages.json_end import JsonEnd


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
