"""One call whose arguments are JSON but for names without quotation marks and texts between marks of their own:
call:name{key:<|"|>text<|"|>,other:[1,{inner:true}]}."""

import json
import re
from collections.abc import Mapping

from kvforge.gateway.languages.argument_values import ANY_TYPE, json_of
from kvforge.gateway.languages.call_events import Arguments, CallBegins, Event
from kvforge.gateway.languages.call_steps import CallSteps
from kvforge.gateway.languages.marked_text import certain_length

_BARE = re.compile(r"[^,{}\[\]]*")
_KEY = re.compile(r"[^:,{}\[\]]*")
_CLOSES = {"{": "}", "[": "]"}


class BracedCall(CallSteps):
    """A call is certain once its arguments begin. Texts are given out as they come, other values whole."""

    def __init__(self, before: str, quote: str, types: Mapping[str, Mapping[str, list[str]]]) -> None:
        """`before` stands before the name, `quote` around texts, and `types` are the functions with the types that
        their arguments may have."""
        super().__init__()
        self._before, self._quote, self._types = before, quote, types
        self._open: list[str] = []
        """The objects and lists that are begun."""
        self._is_empty = True
        """The innermost of them has no member yet."""
        self._key = ""
        self._step = self._start

    def end(self) -> list[Event]:
        """A value that is cut is said as it is."""
        if self._step == self._text:
            return [Arguments(_inner(self._held))]
        return [Arguments(self._bare_json(self._held))] if self._step == self._value and self._held.strip() else []

    def _start(self, events: list[Event]) -> bool:
        return self._expect(self._before, self._called)

    def _called(self, events: list[Event]) -> bool:
        return self._expect_name(self._types, self._arguments)

    def _arguments(self, events: list[Event]) -> bool:
        if not self._held:
            return False
        if self._held[0] != "{":
            return self._is_text()
        self.began = True
        events.append(CallBegins(self._function))
        return self._push("{", events)

    def _member(self, events: list[Event]) -> bool:
        """Another member, or the end of what was opened last."""
        self._held = self._held.lstrip(" \n\t,")
        if not self._held:
            return False
        if self._held[0] in "}]":
            return self._close(events)
        if self._open[-1] == "[":
            self._say(events, "")
            return self._go(self._value)
        if self._quote.startswith(self._held) and self._held != self._quote:
            return False
        key, rest = self._named(self._held)
        if key is None:
            return False
        self._key, self._held = key.strip(), rest
        self._say(events, json.dumps(self._key, ensure_ascii=False) + ": ")
        return self._go(self._value)

    def _named(self, text: str) -> tuple[str | None, str]:
        """A member's name, and what is behind it and its colon; None as long as it may go on."""
        if text.startswith(self._quote):
            name, found, rest = text.removeprefix(self._quote).partition(self._quote)
            rest = rest.lstrip()
            return (name, rest.removeprefix(":")) if found and rest else (None, text)
        found_key = _KEY.match(text)
        assert found_key is not None
        if found_key.end() == len(text):
            return None, text
        return found_key[0], text[found_key.end() :].removeprefix(":")

    def _value(self, events: list[Event]) -> bool:
        self._held = self._held.lstrip()
        if not self._held:
            return False
        if self._held.startswith(self._quote):
            self._held = self._held.removeprefix(self._quote)
            events.append(Arguments('"'))
            return self._go(self._text)
        if self._quote.startswith(self._held):
            return False
        if self._held[0] in _CLOSES:
            return self._push(self._held[0], events)
        found = _BARE.match(self._held)
        assert found is not None
        if found.end() == len(self._held):
            return False
        events.append(Arguments(self._bare_json(found[0])))
        self._held = self._held[found.end() :]
        if self._held[0] in _CLOSES:  # which begins nothing here
            self._held = self._held[1:]
        return self._go(self._member)

    def _text(self, events: list[Event]) -> bool:
        text, found, rest = self._held.partition(self._quote)
        size = len(text) if found else certain_length(text, (self._quote,))
        if size or found:
            events.append(Arguments(_inner(text[:size]) + ('"' if found else "")))
        self._held = rest if found else text[size:]
        return self._go(self._member) if found else False

    def _push(self, bracket: str, events: list[Event]) -> bool:
        events.append(Arguments(bracket))
        self._open.append(bracket)
        self._held, self._is_empty = self._held[1:], True
        return self._go(self._member)

    def _close(self, events: list[Event]) -> bool:
        """Whichever bracket comes, it closes what is open."""
        events.append(Arguments(_CLOSES[self._open.pop()]))
        self._held, self._is_empty = self._held[1:], False
        self.ended = self.has_arguments = not self._open
        return bool(self._open)

    def _say(self, events: list[Event], key: str) -> None:
        before = "" if self._is_empty else ", "
        self._is_empty = False
        if before or key:
            events.append(Arguments(before + key))

    def _bare_json(self, text: str) -> str:
        """A value without marks as JSON."""
        is_argument = len(self._open) == 1
        types = self._types[self._function].get(self._key, ANY_TYPE) if is_argument else ANY_TYPE
        return json_of(text.strip(), types)


def _inner(text: str) -> str:
    """A piece of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
