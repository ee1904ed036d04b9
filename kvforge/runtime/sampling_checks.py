"""Checks of single sampling parameters; every refusal is one sentence with the parameter's name and a remedy."""

import math
from collections.abc import Mapping
from typing import Any

from kvforge.errors import RequestError

MAX_RANGES = 1000


def plain(value: Any, is_list: bool = False) -> Any:
    """Numbers and arrays of numpy as Python's own; where a list is due, lists as tuples and None as no entries."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if is_list:
        if value is None:
            return ()
        if isinstance(value, (list, tuple)):
            return tuple(plain(entry) for entry in value)
        return value
    return tuple(value) if isinstance(value, list) else value


def check_integer(name: str, value: Any, low: int, high: int) -> None:
    """Raise RequestError unless ``value`` is a whole number from ``low`` to ``high``."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        bound = f"of at least {low}" if high >= 2**31 - 1 else f"from {low} to {high}"
        raise RequestError(f"{name} is {value!r}; give a whole number {bound}.")


def check_number(name: str, value: Any, low: float, high: float, open_low: bool) -> None:
    """Raise RequestError unless ``value`` is a number in [low, high], or (low, high] with ``open_low``."""
    if not _is_number(value) or not low <= value <= high or (open_low and value == low):
        above = "above" if open_low else "of at least"
        raise RequestError(f"{name} is {value!r}; give a finite number {above} {low:g} and at most {high:g}.")


def check_flag(name: str, value: Any) -> None:
    """Raise RequestError unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise RequestError(f"{name} is {value!r}; give true or false.")


def check_words(name: str, values: Any, kind: type) -> None:
    """Raise RequestError unless ``values`` is a tuple of non-empty entries of type ``kind``."""
    if not isinstance(values, tuple):
        raise RequestError(f"{name} is {values!r}; give a list.")
    for value in values:
        if not isinstance(value, kind) or len(value) == 0:  # type: ignore[arg-type]
            raise RequestError(f"{name} holds {value!r}; give non-empty entries only.")


def check_ids(name: str, values: Any) -> None:
    """Raise RequestError unless ``values`` is a tuple of token ids."""
    if not isinstance(values, tuple):
        raise RequestError(f"{name} is {values!r}; give lists of token ids.")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise RequestError(f"{name} holds {value!r}; give token ids of at least 0.")


def checked_bias(name: str, values: Any, limit: float) -> dict[int, float] | None:
    """Return a mapping of token ids (also as JSON's text keys) to numbers as ``{int: float}``; None where empty.

    Raises:
        RequestError: a key is no token id, or a number is above ``limit``. One below ``-limit`` becomes -inf.
    """
    if values is None:
        return None
    if not isinstance(values, Mapping):
        raise RequestError(f"{name} is of type {type(values).__name__}; give a mapping of token ids to numbers.")
    result: dict[int, float] = {}
    for key, value in values.items():
        key, value = plain(key), plain(value)
        if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20:
            key = int(key)
        if isinstance(key, bool) or not isinstance(key, int) or key < 0:
            raise RequestError(f"{name} holds the key {key!r}; give token ids of at least 0.")
        if not _is_number(value) or not value <= limit:
            raise RequestError(f"{name} of token {key} is {value!r}; give a number up to {limit:g}, or -inf.")
        if key in result:
            raise RequestError(f"{name} holds token id {key} twice; give each once.")
        result[key] = float(value) if value >= -limit else -math.inf
    return result or None


def check_retention(name: str, values: Any) -> None:
    """Raise RequestError unless ``values`` is a tuple of (start, end, priority) of prompt tokens."""
    if not isinstance(values, tuple):
        raise RequestError(f"{name} is {values!r}; give a list of [start, end, priority].")
    if len(values) > MAX_RANGES:
        raise RequestError(f"{name} holds {len(values)} ranges; give at most {MAX_RANGES}.")
    for entry in values:
        whole = isinstance(entry, tuple) and all(isinstance(v, int) and not isinstance(v, bool) for v in entry)
        if not whole or len(entry) != 3:
            raise RequestError(f"{name} holds {entry!r}; give whole numbers [start, end, priority].")
        start, end, priority = entry
        if start < 0 or (end != -1 and end <= start):
            raise RequestError(f"{name} holds tokens {start} to {end}; give a start of at least 0 and an end above it.")
        if not 0 <= priority <= 100:
            raise RequestError(f"{name} holds priority {priority}; give a whole number from 0 to 100.")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
