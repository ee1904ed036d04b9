"""What an assistant's message says of the reasoning before it, under the names that clients give it back."""

from collections.abc import Mapping
from typing import Any

from kvforge.common.errors import RequestError

REASONING = ("reasoning_content", "reasoning")
"""Two names of one text, what an assistant thought before it answered. Templates read either, so they get both."""
REASONING_LISTS: dict[str, tuple[str, ...]] = {
    "reasoning_details": ("text", "summary"),
    "thinking_blocks": ("thinking",),
}
"""Lists that hold the same in pieces, OpenRouter's and LiteLLM's, and the members of a piece that are its text. What a
provider has encrypted there is for that provider."""


class ReasoningError(RequestError):
    """``field`` of a message cannot be used, and ``what`` is wrong with it."""

    def __init__(self, field: str, what: str) -> None:
        super().__init__(what, field=field)


def past_reasoning(message: Mapping[str, Any]) -> str | None:
    """The reasoning that a message carries, None where it carries none. The lists are read where neither name is given,
    because clients write them beside the text. Raises ReasoningError."""
    texts = {field: message[field] for field in REASONING if message.get(field) is not None}
    for field, text in texts.items():
        if not isinstance(text, str):
            raise ReasoningError(field, "must be text")
    if len(set(texts.values())) > 1:
        raise ReasoningError("reasoning", "differs from reasoning_content, the same under another name; give one")
    listed = {field: _joined(field, message[field]) for field in REASONING_LISTS if message.get(field) is not None}
    found = [*texts.values(), *filter(None, listed.values())]
    return found[0] if found else None


def _joined(field: str, pieces: Any) -> str:
    if not isinstance(pieces, list) or not all(isinstance(piece, dict) for piece in pieces):
        raise ReasoningError(field, "must be a list of objects")
    texts = [piece[member] for piece in pieces for member in REASONING_LISTS[field] if piece.get(member) is not None]
    if not all(isinstance(text, str) for text in texts):
        raise ReasoningError(field, f"must hold texts as {' or '.join(REASONING_LISTS[field])}")
    return "".join(texts)
