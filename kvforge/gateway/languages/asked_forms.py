"""What an answer may hold besides text, as a request asks for it. Serializable: a worker process reads requests."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Calls:
    """Tool calls that an answer may hold: its format's name, the functions that may be called, each with the types that
    its arguments may have, what the prompt already says of the answer, whether the answer is one, whether there may be
    several, and the format's markers that are tokens."""

    format: str
    types: dict[str, dict[str, list[str]]]
    prefix: str
    forced: bool
    parallel: bool
    tokens: tuple[str, ...] = ()


@dataclass(frozen=True)
class Thinking:
    """Reasoning that an answer may begin with: its format's name, whether the prompt has begun it, and the format's
    markers that are tokens, with their ids."""

    format: str
    opened: bool
    tokens: dict[str, int]
