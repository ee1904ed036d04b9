"""Checks of single numbers; every refusal is one sentence with the number's name and a remedy."""

import reprlib
from typing import Any

from kvforge.common.errors import RequestError
from kvforge.common.sampling_fields import SAMPLING_FIELDS

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxlong = _repr.maxother = 100
shown = _repr.repr
"""A value as Python writes it, cut where it is long."""


def is_number(value: Any) -> bool:
    """Whether a value is a number, and no truth value."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_integer(name: str, value: Any, low: int, high: int) -> None:
    """Raise RequestError unless ``value`` is a whole number from ``low`` to ``high``."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        is_below = isinstance(value, int) and value < low
        bound = f"of at least {low}" if high >= 2**31 - 1 and is_below else f"from {low} to {high}"
        raise RequestError(f"is {shown(value)}", f"give a whole number {bound}", field=name)


def check_number(name: str, value: Any, low: float, high: float, open_low: bool) -> None:
    """Raise RequestError unless ``value`` is a number in [low, high], or (low, high] with ``open_low``."""
    if not is_number(value) or not low <= value <= high or (open_low and value == low):
        above = "above" if open_low else "of at least"
        raise RequestError(
            f"is {shown(value)}", f"give a finite number {above} {low:g} and at most {high:g}", field=name
        )


def check_sampling(name: str, value: Any) -> None:
    """Raise RequestError unless ``value`` is in the range that SAMPLING_FIELDS has for that name."""
    field = SAMPLING_FIELDS[name]
    if field.is_whole:
        check_integer(name, value, int(field.low), int(field.high))
    else:
        check_number(name, value, field.low, field.high, field.open_low)
