"""Checks of single numbers; every refusal is one sentence with the number's name and a remedy."""

import reprlib
from collections.abc import Mapping
from typing import Any

from kvforge.common.errors import RequestError

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxlong = _repr.maxother = 100
shown = _repr.repr
"""A value as Python writes it, cut where it is long."""

INTEGERS_OF_SAMPLING: Mapping[str, tuple[int, int]] = {"top_k": (-1, 2**31 - 1)}
NUMBERS_OF_SAMPLING: Mapping[str, tuple[float, float, bool]] = {
    "temperature": (0.0, 1e4, False),
    "top_p": (0.0, 1.0, True),
    "min_p": (0.0, 1.0, False),
    "repetition_penalty": (1e-3, 1e3, False),
}
"""Ranges of what a request and a model's generation_config.json may say of sampling."""


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


def check_sampling(values: Mapping[str, Any]) -> None:
    """Raise RequestError for the first default of sampling that is outside its range; null says nothing."""
    for name, whole in INTEGERS_OF_SAMPLING.items():
        if values.get(name) is not None:
            check_integer(name, values[name], *whole)
    for name, bounds in NUMBERS_OF_SAMPLING.items():
        if values.get(name) is not None:
            check_number(name, values[name], *bounds)
