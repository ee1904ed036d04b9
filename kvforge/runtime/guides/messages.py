"""What llguidance says, for people."""

import re
from typing import Any

_EXCERPT = re.compile(r"(?:\n +\d+ \| .*|\n *\^)+\s*\Z")
_PLACE = re.compile(r"at \d+\(\d+\): ")
"""Both are of the Lark grammar that a guide was made into."""


def message_of(matcher: Any) -> str:
    """Why a matcher gave up, in llguidance's words as one line without a full stop."""
    words = _EXCERPT.sub("", matcher.get_error().split("<state>")[0].replace("<non-verbose/>", ""))
    line = " ".join(words.split()).rstrip(".")
    if line.startswith("NoExtension"):
        return "it allows no text"
    return line if len(line) <= 300 else line[:300] + "…"


def without_place(words: str) -> str:
    """The same of a guide whose sender did not write the grammar that the place is in."""
    return words[found.end() :] if (found := _PLACE.match(words)) else words


def is_lexers(matcher: Any) -> bool:
    """Whether a matcher gave up for a limit of its lexer, which copies share."""
    return (
        "lexer" in f"{matcher.stop_reason()} {matcher.get_error()}".lower() or "too many states" in matcher.get_error()
    )
