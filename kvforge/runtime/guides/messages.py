"""What llguidance says, for people."""

from typing import Any


def message_of(matcher: Any) -> str:
    """Why a matcher gave up, in llguidance's words as one line without a full stop."""
    words = matcher.get_error().split("<state>")[0].replace("<non-verbose/>", "")
    line = " ".join(words.split()).rstrip(".")
    if line.startswith("NoExtension"):
        return "it allows no text"
    return line if len(line) <= 300 else line[:300] + "…"


def is_lexers(matcher: Any) -> bool:
    """Whether a matcher gave up for a limit of its lexer, which copies share."""
    return (
        "lexer" in f"{matcher.stop_reason()} {matcher.get_error()}".lower() or "too many states" in matcher.get_error()
    )
