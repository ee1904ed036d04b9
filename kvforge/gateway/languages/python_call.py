"""One call in Python's notation: name(argument=value, ...)."""

import json
import re
from collections.abc import Set

from kvforge.gateway.languages.argument_values import literal_of
from kvforge.gateway.languages.call_events import Arguments, CallBegins, Event
from kvforge.gateway.languages.call_steps import CallSteps

_KEY = re.compile(r"\s*([^\s=()\[\]{},\"']+)\s*=")
_KEY_BEGINS = re.compile(r"\s*[^\s=()\[\]{},\"']*\s*")
_PLAIN = re.compile(r"[\[\](){},\"']")
_QUOTED = {quote: re.compile(rf"[\\{quote}]") for quote in "\"'"}


class PythonCall(CallSteps):
    """A call is certain once its first argument has a name, or where its end says that there is none. Arguments are
    given out whole."""

    def __init__(self, names: Set[str]) -> None:
        super().__init__()
        self._names = names
        self._num_arguments = 0
        self._scanned, self._depth, self._quote = 0, 0, ""
        self._step = self._called

    def end(self) -> list[Event]:
        """A value that is cut is said as it is."""
        return [Arguments(self._held.lstrip())] if self._step == self._value else []

    def _called(self, events: list[Event]) -> bool:
        return self._expect_name(self._names, self._open)

    def _open(self, events: list[Event]) -> bool:
        if not self._held:
            return False
        if self._held[0] != "(":
            return self._is_text()
        self._take(1)
        return self._go(self._next)

    def _next(self, events: list[Event]) -> bool:
        """Another argument, or the end."""
        if self._held.lstrip().startswith(")"):
            self._begin(events)
            self._held = self._held.lstrip()[1:]
            return self._finish(events)
        found = _KEY.match(self._held)
        begins = _KEY_BEGINS.match(self._held)
        if found is None and begins is not None and begins.end() == len(self._held):
            return False
        if found is None and not self.began:
            return self._is_text()
        self._begin(events)
        name = "" if found is None else found[1]
        self._held = self._held if found is None else self._held[found.end() :]
        begins_with = ", " if self._num_arguments else "{"
        events.append(Arguments(f"{begins_with}{json.dumps(name, ensure_ascii=False)}: "))
        self._num_arguments += 1
        self._scanned, self._depth, self._quote = 0, 0, ""
        return self._go(self._value)

    def _value(self, events: list[Event]) -> bool:
        end = self._value_end()
        if end < 0:
            return False
        events.append(Arguments(literal_of(self._held[:end])))
        ends = self._held[end] != ","
        self._held = self._held[end + 1 :]
        return self._finish(events) if ends else self._go(self._next)

    def _value_end(self) -> int:
        """Where the comma or bracket behind the value is; -1 as long as it has not come."""
        while found := (_QUOTED[self._quote] if self._quote else _PLAIN).search(self._held, self._scanned):
            char = found[0]
            if char == "\\" and found.end() == len(self._held):
                self._scanned = found.start()
                return -1
            self._scanned = found.end() + (char == "\\")
            if self._quote:
                self._quote = "" if char == self._quote else self._quote
            elif char in "\"'":
                self._quote = char
            elif char in "[({":
                self._depth += 1
            elif self._depth == 0:
                return found.start()
            elif char != ",":
                self._depth -= 1
        self._scanned = len(self._held)
        return -1

    def _begin(self, events: list[Event]) -> None:
        if not self.began:
            self.began = True
            events.append(CallBegins(self._function))

    def _finish(self, events: list[Event]) -> bool:
        events.append(Arguments("}" if self._num_arguments else "{}"))
        self.ended = self.has_arguments = True
        return False
