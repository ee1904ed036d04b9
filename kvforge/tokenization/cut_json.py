"""JSON that ended too early, as calls of tools do whose answer met its limit."""

import contextlib
import json
import re
from typing import Any

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+', re.DOTALL)
_CLOSES = {"{": "}", "[": "]"}
_NUMBER = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?(?:(?<=[0-9])[eE][+-]?[0-9]*)?)?")
_WORDS = ("true", "false", "null", "NaN", "Infinity", "-Infinity")
_ODD = r"(?<!\\)((?:\\\\)*)"
_HALF_ESCAPE = re.compile(_ODD + r"\\(?:u[0-9a-fA-F]{0,3})?$")
_HALF_CHARACTER = re.compile(_ODD + r"\\u[dD][89abAB][0-9a-fA-F]{2}$")
"""What ends a string that was cut inside an escape, or between the two escapes of one character."""


def cut_object(text: str) -> dict[str, Any] | None:
    """Return the object of which a text is the beginning, or all; None where it is neither.

    Of what is incomplete at the end a string is kept as far as it is there, and another value or a name left out.
    """
    with contextlib.suppress(ValueError):
        return _as_object(text)
    open_ones: list[str] = []
    start = at = whole = 0
    names, token = False, ""
    for found in _TOKEN.finditer(text):
        if text[at : found.start()].strip():
            break
        start, at, token = found.start(), found.end(), found[0]
        if token in ",:":
            names = token == "," and open_ones[-1:] == ["}"]
            continue
        if token in _CLOSES:
            open_ones.append(_CLOSES[token])
        elif token in "]}":
            if open_ones[-1:] != [token]:
                return None
            open_ones.pop()
        elif names or (at == len(text) and token not in ("true", "false", "null") and token[0] != '"'):
            continue
        names = token == "{"
        whole = at
    if text[at:].strip():  # a string without its end
        filled = _HALF_CHARACTER.sub(r"\1", _HALF_ESCAPE.sub(r"\1", text)) + '"'
        kept, filled = (text[:whole], filled + ":0") if names else (filled, filled)
    else:
        kept, filled = text[:whole], text if whole == at else _filled(text, start, token, names)
    closes = "".join(reversed(open_ones))
    with contextlib.suppress(ValueError):
        value = _as_object(filled + closes)
        return value if kept == filled else _as_object(kept + closes)
    return None


def _as_object(text: str) -> dict[str, Any] | None:
    """A JSON object; None for another value, or one nested too deeply. Raises ValueError where it is no JSON."""
    try:
        value = json.loads(text)
    except RecursionError:
        return None
    return value if isinstance(value, dict) else None


def _filled(text: str, start: int, token: str, names: bool) -> str:
    """A text with something in the place of what lacks behind, or of, its last token, which begins at ``start``."""
    if token == ",":
        return text + ('"":0' if names else "0")
    if token == ":":
        return text + "0"
    if token[0] == '"':
        return text + ":0"
    is_beginning = _NUMBER.fullmatch(token) or any(word.startswith(token) for word in _WORDS)
    return text[:start] + "0" if is_beginning else ""
