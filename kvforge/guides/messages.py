"""What llguidance says, for people."""

from typing import Any


def message_of(matcher: Any) -> str:
    """Why a matcher gave up, in llguidance's words as one line without a full stop."""
    words = matcher.get_error().split("<state>")[0].replace("<non-verbose/>", "")
    line = " ".join(words.split()).rstrip(".")
    if line.startswith("NoExtension"):
        return "it allows no text"
    return line if len(line) <= 300 else line[:300] + "…"
