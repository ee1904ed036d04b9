"""What a schema says of texts, as regular expressions of a grammar for texts that stand without quotation marks."""

import re
from collections.abc import Iterator
from typing import Any

MAX_LENGTH = 1000
"""Characters that a guide counts."""
KEYWORDS = frozenset({"pattern", "minLength", "maxLength", "format"})
_ANYTHING = r"(.|\n)*"
_DATE = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]+)?([Zz]|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[Tt]{_TIME}",
    "uuid": "-".join(f"[0-9a-fA-F]{{{size}}}" for size in (8, 4, 4, 4, 12)),
}


def text_terms(schema: dict[str, Any]) -> tuple[list[str], set[str]]:
    """Expressions that a text matches, all of them, and the keywords of KEYWORDS that they leave out."""
    found = [part for part in (_lengths(schema), _pattern(schema), _FORMATS.get(schema.get("format", ""))) if part]
    left = {
        *({"minLength", "maxLength"} & schema.keys() if _lengths(schema) is None else ()),
        *({"pattern"} & schema.keys() if _pattern(schema) is None else ()),
        *({"format"} & schema.keys() if schema.get("format", "") not in _FORMATS else ()),
    }
    return [f"/{_inside_slashes(part)}/" for part in found], left


def without(text: str) -> str:
    """The expression of texts that do not hold this one."""
    return f"~/{_ANYTHING}{_inside_slashes(re.escape(text))}{_ANYTHING}/"


def _lengths(schema: dict[str, Any]) -> str | None:
    """None where they are too large to be counted; empty where there are none."""
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if max(least, most or 0) > MAX_LENGTH:
        return None
    return r"(.|\n){" + f"{int(least)},{'' if most is None else int(most)}" + "}" if least or most is not None else ""


def _pattern(schema: dict[str, Any]) -> str | None:
    """The expression of whole texts that hold a pattern; None where its anchors stand elsewhere than at its ends."""
    pattern = schema.get("pattern", "")
    if not pattern:
        return ""
    plain = list(_outside_of_classes(pattern))
    begins, ends = plain[0] == "^", len(pattern) > 1 and plain[-1] == "$"
    inner = plain[begins : len(plain) - ends]
    if "^" in inner or "$" in inner or ((begins or ends) and _has_choice(inner)):
        return None
    body = pattern[begins : len(pattern) - ends]
    return ("" if begins else _ANYTHING) + f"({body})" + ("" if ends else _ANYTHING)


def _outside_of_classes(pattern: str) -> Iterator[str]:
    """The letters of a pattern that are not escaped and not in a class, such as [^a]; others as blanks."""
    in_class = escaped = False
    for letter in pattern:
        is_plain = not escaped and not in_class
        yield letter if is_plain and letter not in "\\[" else " "
        if escaped:
            escaped = False
        elif letter == "\\":
            escaped = True
        elif letter == "[":
            in_class = True
        elif letter == "]":
            in_class = False


def _has_choice(letters: list[str]) -> bool:
    """Whether a pattern is a choice of several, outside of its brackets."""
    depth = 0
    for letter in letters:
        depth += (letter == "(") - (letter == ")")
        if letter == "|" and depth == 0:
            return True
    return False


def _inside_slashes(expression: str) -> str:
    escaped = re.sub(r"\\(.)|/", lambda found: found[0] if found[1] else r"\/", expression, flags=re.DOTALL)
    return escaped.replace("\n", r"\n")
