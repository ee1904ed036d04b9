"""Frozen dataclasses from JSON data: all fields there, no others, each of its type."""

import dataclasses
import math
import re
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from model_defs.errors import ModelError

Record = TypeVar("Record")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
IMPOSSIBLE = "holds impossible values"


class RecordError(ValueError):
    """Data that is no such record; its text goes on after what holds it: ``lacks cut``."""


def read_record(kind: type[Record], data: object) -> Record:
    """Return the dataclass ``kind`` whose fields are those of the JSON object ``data``; lists become tuples.

    Raises:
        RecordError: a field is missing or unknown, has a value of another type, or the class refuses the values.
    """
    if not isinstance(data, dict):
        raise RecordError(IMPOSSIBLE)
    kinds = get_type_hints(kind)
    missing, unknown = kinds.keys() - data.keys(), data.keys() - kinds.keys()
    if missing or unknown:
        raise RecordError(f"lacks {min(missing)}" if missing else f"has the unknown field {min(unknown)}")
    try:
        return kind(**{name: _value(each, data[name]) for name, each in kinds.items()})
    except ModelError:
        raise RecordError(IMPOSSIBLE) from None


def _value(kind: Any, value: Any) -> Any:
    """A field's value of the JSON value; raises RecordError unless it is of the type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if NoneType in arguments:
        return None if value is None else _value(arguments[0], value)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return read_record(kind, value)
    if origin is tuple and isinstance(value, list):
        kinds = arguments if arguments[-1] is not Ellipsis else arguments[:1] * len(value)
        if len(kinds) == len(value):
            return tuple(map(_value, kinds, value))
    elif origin is dict and isinstance(value, dict):
        return {name: _value(arguments[1], each) for name, each in value.items()}
    elif kind is float and isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf:
        return float(value)
    elif kind in (bool, int, str) and type(value) is kind and not (kind is str and _SURROGATE.search(value)):
        return value
    raise RecordError(IMPOSSIBLE)
