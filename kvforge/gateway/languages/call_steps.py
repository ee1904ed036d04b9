"""What calls that are read step by step have in common."""

import re
from collections.abc import Callable, Container
from typing import Protocol

from kvforge.gateway.languages.call_events import Event
from kvforge.gateway.languages.function import MAX_NAME

NAME = re.compile(r"[A-Za-z0-9_.-]*")


class WrittenCall(Protocol):
    """One call while it is being written. `push` until `ended`; `text` is then what proved to be no call, None for a
    call. Where the call ends does not depend on how the text is cut.

    `began`: it is a call for certain. `has_arguments`: all of them are there, if not the call's end.
    """

    ended: bool
    began: bool
    has_arguments: bool
    text: str | None

    def push(self, text: str) -> tuple[list[Event], str]:
        """The events of a piece, and what of it comes after the call."""

    def give_up(self) -> str | None:
        """The text so far where it is no call yet; None where a call has begun."""

    def end(self) -> list[Event]:
        """What is left to say where the text ends within the call."""


class CallSteps:
    """A WrittenCall whose `_step` takes what it can of the held text, and says whether another step can go on."""

    def __init__(self) -> None:
        self._held = ""
        self._taken = ""
        """The text of the steps before, in case that it is no call."""
        self._step: Callable[[list[Event]], bool]
        self._function = ""
        self.ended = self.began = self.has_arguments = False
        self.text: str | None = None

    def push(self, text: str) -> tuple[list[Event], str]:
        """As WrittenCall."""
        events: list[Event] = []
        self._held += text
        while not self.ended and self._step(events):
            pass
        if not self.ended:
            return events, ""
        rest, self._held = self._held, ""
        return events, rest

    def give_up(self) -> str | None:
        """As WrittenCall."""
        return None if self.began else self._taken + self._held

    def end(self) -> list[Event]:
        """As WrittenCall."""
        return []

    def _go(self, step: Callable[[list[Event]], bool]) -> bool:
        self._step = step
        return True

    def _take(self, size: int) -> str:
        """The next characters."""
        text, self._held = self._held[:size], self._held[size:]
        if not self.began:
            self._taken += text
        return text

    def _literal(self, *literals: str) -> str | None:
        """The one of these texts that comes next, behind blanks, which is taken; empty as long as that is not clear,
        None where none does. None of them begins with another one."""
        rest = self._held.lstrip()
        found = next((literal for literal in literals if rest.startswith(literal)), None)
        if found is not None:
            self._take(len(self._held) - len(rest) + len(found))
            return found
        return "" if any(literal.startswith(rest) for literal in literals) else None

    def _expect(self, literal: str, then: Callable[[list[Event]], bool]) -> bool:
        """Go on with `then` behind this text; where another one comes, it is no call."""
        found = self._literal(literal)
        if found is None:
            return self._is_text()
        return self._go(then) if found else False

    def _expect_name(self, names: Container[str], then: Callable[[list[Event]], bool]) -> bool:
        """Go on with `then` behind the name of one of these functions, which is `_function` from here on; where another
        name comes, it is no call."""
        name = self._name()
        if name is None:
            return False
        self._function = name
        return self._go(then) if name in names else self._is_text()

    def _name(self) -> str | None:
        """The name that comes next, which is taken; None as long as it may go on."""
        rest = self._held.lstrip()
        found = NAME.match(rest)
        assert found is not None
        if found.end() == len(rest) and len(rest) <= MAX_NAME:
            return None
        self._take(len(self._held) - len(rest) + found.end())
        return found[0]

    def _is_text(self) -> bool:
        """It is no call: what is taken is text, and what follows may be anything."""
        self.text, self.ended = self._taken, True
        return False
