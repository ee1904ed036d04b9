"""Finds the end of a JSON object or list in text that comes in pieces."""

import re

_OUTSIDE = re.compile(r'[{}\[\]"]')
_INSIDE = re.compile(r'["\\]')


class JsonEnd:
    """Counts brackets outside strings; `depth` are open already. What is between them is not checked."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = False
        self._escaped = False

    def find(self, text: str, start: int = 0) -> int:
        """The index after the bracket that closes the value, -1 where it is still open at the text's end. Go on with
        the next piece."""
        at = start
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = (_INSIDE if self._in_string else _OUTSIDE).search(text, at)
            if found is None:
                return -1
            at, char = found.end(), found[0]
            if char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = not self._in_string
            elif char in "{[":
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth <= 0:
                    return at
        return -1
