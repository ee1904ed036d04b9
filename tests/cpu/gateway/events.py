"""Events of an answer put together again, and texts in pieces."""

import random
from collections.abc import Iterable

from kvforge.gateway.languages.call_events import Arguments, CallBegins, Event, Reasoning, Text


def put_together(events: Iterable[Event]) -> tuple[str, str, list[tuple[str, str]]]:
    """Reasoning, content and calls, each with its arguments."""
    reasoning, content, calls = "", "", []
    for event in events:
        if isinstance(event, Text):
            content += event.text
        elif isinstance(event, Reasoning):
            reasoning += event.text
        elif isinstance(event, CallBegins):
            calls.append((event.name, ""))
        else:
            assert isinstance(event, Arguments)
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
    return reasoning, content, calls


def cut(rng: random.Random, text: str) -> list[str]:
    """A text in random pieces."""
    pieces = []
    while text:
        size = rng.randrange(1, 12)
        pieces.append(text[:size])
        text = text[size:]
    return pieces
