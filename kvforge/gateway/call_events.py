"""What a text with tool calls in it says, piece by piece."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Text:
    """A piece of the answer's content."""

    text: str


@dataclass(frozen=True)
class CallBegins:
    """A call of a function; its arguments follow."""

    name: str


@dataclass(frozen=True)
class Arguments:
    """A piece of the latest call's arguments, which are JSON together."""

    text: str


Event = Text | CallBegins | Arguments
