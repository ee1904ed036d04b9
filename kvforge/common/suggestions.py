"""What a misspelt name may have been."""

import difflib
from collections.abc import Iterable


def did_you_mean(word: object, known: Iterable[object]) -> str:
    """Return ``"; did you mean NAME?"`` for the nearest of ``known``, or nothing where all of them are far."""
    near = difflib.get_close_matches(str(word), [str(name) for name in known], n=1)
    return f"; did you mean {near[0]}?" if near else ""
