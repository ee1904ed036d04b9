"""What an answer's text says, piece by piece."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Text:
    """A piece of the answer's content."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """A piece of what comes before the answer."""

    text: str


@dataclass(frozen=True)
class CallBegins:
    """A call of a function; its arguments follow."""

    name: str


@dataclass(frozen=True)
class Arguments:
    """A piece of the latest call's arguments, which are JSON together."""

    text: str


Event = Text | Reasoning | CallBegins | Arguments
