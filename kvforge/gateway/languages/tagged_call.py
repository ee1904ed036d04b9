"""One call whose arguments stand between marks of their own, texts as they are and all other values as JSON."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvforge.gateway.languages.argument_values import ANY_TYPE, TEXT, json_of
from kvforge.gateway.languages.call_events import Arguments, CallBegins, Event
from kvforge.gateway.languages.call_steps import CallSteps
from kvforge.gateway.languages.marked_text import certain_length


@dataclass(frozen=True)
class Tags:
    """What stands before and after a call's name, an argument's name and its value, and what follows the last one.

    `breaks`: one line break at each end of a value is none of it.
    """

    name: tuple[str, str]
    key: tuple[str, str]
    value: tuple[str, str]
    ends: str
    breaks: bool = False

    def marked(self, mark: Callable[[str], str]) -> "Tags":
        """With its marks as the text has them."""

        def both(pair: tuple[str, str]) -> tuple[str, str]:
            return mark(pair[0]), mark(pair[1])

        return Tags(both(self.name), both(self.key), both(self.value), mark(self.ends), self.breaks)


class TaggedCall(CallSteps):
    """A call is certain once its first argument begins, or where its end says that there is none. An argument that can
    only be a text is given out as it comes, others whole."""

    def __init__(self, tags: Tags, types: Mapping[str, Mapping[str, list[str]]], closes: str) -> None:
        """`types` are the functions with the types that their arguments may have. `closes` ends every call, and stays
        in the text."""
        super().__init__()
        self._tags, self._types, self._closes = tags, types, closes
        self._num_arguments = 0
        self._allowed: frozenset[str] = ANY_TYPE
        self._said = False
        """Some of the value, a text, is out."""
        self._ends = (f"\n{tags.value[1]}", tags.value[1]) if tags.breaks else (tags.value[1],)
        self._step = self._start if tags.name[0] else self._called

    def end(self) -> list[Event]:
        """A value that is cut is said as it is."""
        if self._step != self._value:
            return []
        text = self._held if self._allowed != TEXT else self._string(self._held)
        return [Arguments(text)]

    def _start(self, events: list[Event]) -> bool:
        return self._expect(self._tags.name[0], self._called)

    def _called(self, events: list[Event]) -> bool:
        return self._expect_name(self._types, self._named if self._tags.name[1] else self._next)

    def _named(self, events: list[Event]) -> bool:
        return self._expect(self._tags.name[1], self._next)

    def _next(self, events: list[Event]) -> bool:
        """Another argument, or the end; anything else ends a call that has begun."""
        held, taken = self._held, self._taken
        found = self._literal(self._tags.key[0], *([self._tags.ends] if self._tags.ends else []), self._closes)
        if found == "":
            return False
        if found is None and not self.began:
            return self._is_text()
        if not self.began:
            self.began = True
            events.append(CallBegins(self._function))
        if found == self._tags.key[0]:
            return self._go(self._key)
        if found == self._closes:
            self._held, self._taken = held, taken
        events.append(Arguments("}" if self._num_arguments else "{}"))
        self.ended = self.has_arguments = True
        return False

    def _key(self, events: list[Event]) -> bool:
        name, found, rest = self._held.partition(self._tags.key[1])
        if not found:
            return False
        self._held = rest
        self._allowed = frozenset(self._types[self._function].get(name, ANY_TYPE))
        begins = ", " if self._num_arguments else "{"
        events.append(Arguments(f"{begins}{json.dumps(name, ensure_ascii=False)}: "))
        self._num_arguments += 1
        self._said = False
        return self._go(self._before_value)

    def _before_value(self, events: list[Event]) -> bool:
        if self._tags.breaks:
            if not self._held:
                return False
            self._held = self._held.removeprefix("\n")
        elif self._tags.value[0] and self._literal(self._tags.value[0]) == "":
            return False
        return self._go(self._value)

    def _value(self, events: list[Event]) -> bool:
        end = self._held.find(self._tags.value[1])
        if end < 0:
            size = certain_length(self._held, self._ends) if self._allowed == TEXT else 0
            events += [Arguments(self._string(self._take(size)))] if size else []
            return False
        value = self._held[:end]
        self._held = self._held[end + len(self._tags.value[1]) :]
        value = value.removesuffix("\n") if self._tags.breaks else value
        if self._allowed == TEXT:
            events.append(Arguments(self._string(value) + '"'))
        else:
            events.append(Arguments(json_of(value, self._allowed)))
        return self._go(self._next)

    def _string(self, text: str) -> str:
        """A piece of a JSON string, which its first one opens."""
        opens, self._said = "" if self._said else '"', True
        return opens + json.dumps(text, ensure_ascii=False)[1:-1]
