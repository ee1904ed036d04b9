"""JSON that ended too early, as calls of tools do whose answer met its limit."""

import json
import re
from typing import Any

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+', re.DOTALL)
_CLOSES = {"{": "}", "[": "]"}
_ODD = r"(?<!\\)((?:\\\\)*)"
_HALF_ESCAPE = re.compile(_ODD + r"\\(?:u[0-9a-fA-F]{0,3})?$")
_HALF_CHARACTER = re.compile(_ODD + r"\\u[dD][89abAB][0-9a-fA-F]{2}$")
"""What ends a string that was cut inside an escape, or between the two escapes of one character."""


def cut_object(text: str) -> dict[str, Any] | None:
    """Return the object of which a text is the beginning, or all; None where it is neither.

    Of what is incomplete at the end a string is kept as far as it is there, and another value or a name left out.
    """
    open_ones: list[str] = []
    at = whole = 0
    names = False
    for found in _TOKEN.finditer(text):
        if text[at : found.start()].strip():
            break
        at, token = found.end(), found[0]
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
    closes = "".join(reversed(open_ones))
    in_string = not names and text[at:].lstrip().startswith('"')
    kept = _HALF_CHARACTER.sub(r"\1", _HALF_ESCAPE.sub(r"\1", text)) + '"' if in_string else text[:whole]
    try:
        value = json.loads(kept + closes)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
