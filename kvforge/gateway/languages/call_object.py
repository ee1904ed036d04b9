"""One tool call as a JSON object, read while it is being written: {"name": ..., "arguments": {...}}."""

import json
import re
from bisect import bisect_right
from collections.abc import Mapping, Set

from kvforge.gateway.languages.call_events import Arguments, CallBegins, Event
from kvforge.gateway.languages.call_steps import CallSteps
from kvforge.gateway.languages.json_end import JsonEnd

MAX_HEAD = 1024
"""Characters before the arguments within which a call is recognised before its end."""
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


class CallObject(CallSteps):
    """Reads one object. A call is certain once it has a known name and its arguments begin; these are then given out
    as they come. An object in another order is text: no guide kept to its arguments."""

    def __init__(self, names: Set[str], heads: Mapping[str, str] | None = None) -> None:
        """With `heads` a call is what begins with exactly one of these, which stand for names."""
        super().__init__()
        self._names = names
        self._heads = heads
        self._sorted = sorted(heads or ())
        self._scanned = 0
        self._end = JsonEnd()
        self._step = self._head if heads is None else self._exact_head

    def _head(self, events: list[Event]) -> bool:
        found = _HEAD.match(self._held[:MAX_HEAD])
        if found:
            name = _string(found[1])
            if name not in self._names:
                return self._is_text_to(found.end())
            self._begin(name, self._held[found.end() :], events)
            return True
        start = len(self._held) - len(self._held.lstrip())
        if start == len(self._held):
            return False
        if self._held[start] != "{":
            return self._is_text_to(start)
        end = self._end.find(self._held, self._scanned)
        self._scanned = len(self._held)
        return False if end < 0 else self._is_text_to(end)

    def _exact_head(self, events: list[Event]) -> bool:
        assert self._heads is not None
        text = self._held.lstrip()
        # The head that has most in common with a text is beside its place in their order.
        place = bisect_right(self._sorted, text)
        near = self._sorted[max(place - 1, 0) : place + 1]
        like = max(_num_common(head, text) for head in near)
        head = next((head for head in near if text.startswith(head)), None)
        if head is not None:
            self._begin(self._heads[head], text[like:], events)
            return True
        if like == len(text):
            return False
        return self._is_text_to(len(self._held) - len(text) + max(1, like))

    def _begin(self, name: str, rest: str, events: list[Event]) -> None:
        self._held = rest
        self.began = True
        self._end = JsonEnd()
        self._step = self._arguments
        events.append(CallBegins(name))

    def _arguments(self, events: list[Event]) -> bool:
        end = self._end.find(self._held)
        piece = self._held if end < 0 else self._held[:end]
        self._held = self._held[len(piece) :]
        if piece:
            events.append(Arguments(piece))
        if end >= 0:
            self.has_arguments = True
            self._step = self._after
        return end >= 0

    def _after(self, events: list[Event]) -> bool:
        """Between the arguments and the end of the object; one that is not closed ends where something else begins."""
        rest = self._held.lstrip()
        if not rest:
            return False
        if rest[0] == ",":
            self._end = JsonEnd(depth=1)
            self._step = self._others
            return True
        if rest[0] == "}":
            self._held = rest[1:]
        self.ended = True
        return False

    def _others(self, events: list[Event]) -> bool:
        """Members after the arguments, which say nothing here."""
        end = self._end.find(self._held)
        self._held = "" if end < 0 else self._held[end:]
        self.ended = end >= 0
        return False

    def _is_text_to(self, end: int) -> bool:
        self._take(end)
        return self._is_text()


def _num_common(one: str, other: str) -> int:
    """How many first characters are the same."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))


def _string(text: str) -> str:
    try:
        return str(json.loads(text))
    except ValueError:
        return ""
