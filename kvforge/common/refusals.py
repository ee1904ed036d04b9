"""Why a request is refused, as data. Each face (Python, Triton, OpenAI's API) writes its own sentence from it."""

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

PROMPT = "prompt"
"""The field that a prompt comes in, whatever a face calls it."""
CONTEXT_LENGTH = "context_length_exceeded"
TOO_LARGE = "request_too_large"
UNKNOWN_TOKEN = "unknown_token"
QUEUE_FULL = "queue_full"
GUIDES_FULL = "guide_queue_full"
GUIDE_GAVE_UP = "guide_gave_up"
NO_TOKEN_LEFT = "no_token_left"
SHUTTING_DOWN = "shutting_down"
"""Codes: what programs may want to tell apart."""


@dataclass(frozen=True)
class Refusal:
    """What is wrong with a request, and what helps.

    Attributes:
        reason: what is wrong: what follows the field's name in a sentence, a sentence by itself where there is none.
        remedy: what the sender can do about it. ``{name}`` stands for another field.
        field: the name that SamplingParams has for it, ``PROMPT``, or that of an input that has no other name.
        code: one of the codes above.
        operator: what whoever runs the engine can do, or should know.
    """

    reason: str
    remedy: str = ""
    field: str | None = None
    code: str | None = None
    operator: str = ""

    def sentence(self, subject: str, named: Callable[[str], str] = str) -> str:
        """The refusal in words, without a full stop: ``subject`` is what a face calls the field, ``named`` gives its
        name of others."""
        said = f"{subject} {self.reason}" if subject else self.reason
        remedy = re.sub(r"\{(\w+)\}", lambda found: named(found[1]), self.remedy)
        ways = ", or ".join(filter(None, (remedy, self.operator)))
        return f"{said}; {ways}" if ways else said

    @property
    def words(self) -> str:
        """As Python and the command line say it, without a full stop."""
        return self.sentence("the prompt" if self.field == PROMPT else self.field or "")

    def __str__(self) -> str:
        return f"{self.words}."

    def to_json(self) -> dict[str, Any]:
        """As data for JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Refusal":
        """The inverse of ``to_json``."""
        return cls(**data)


SERVER_ENDS = Refusal("the server is shutting down", "send the request to another server or later", code=SHUTTING_DOWN)
