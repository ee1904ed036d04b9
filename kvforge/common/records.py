"""Frozen dataclasses as JSON and back: all fields there, no others, each of its type."""

import dataclasses
import json
import math
import re
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

Record = TypeVar("Record")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
IMPOSSIBLE = "holds impossible values"


class RecordError(ValueError):
    """Data that is no such record; its text goes on after what holds it: ``lacks cut``."""


def read_record(kind: type[Record], data: object) -> Record:
    """Return the dataclass ``kind`` whose fields are those of the JSON object ``data``; lists become tuples.

    Raises:
        RecordError: a field is missing or unknown, has a value of another type, or the class refuses the values with a
            ValueError.
    """
    if not isinstance(data, dict):
        raise RecordError(IMPOSSIBLE)
    kinds = get_type_hints(kind)
    missing, unknown = kinds.keys() - data.keys(), data.keys() - kinds.keys()
    if missing or unknown:
        raise RecordError(f"lacks {min(missing)}" if missing else f"has the unknown field {min(unknown)}")
    values = {name: _value(each, data[name]) for name, each in kinds.items()}
    try:
        return kind(**values)
    except ValueError:
        raise RecordError(IMPOSSIBLE) from None


def to_text(record: Any, kind: type | None = None) -> str:
    """Return a dataclass as JSON, of which ``from_text`` makes it again; of the fields of its base ``kind`` alone."""
    names = {field.name for field in dataclasses.fields(kind or record)}
    values = {name: value for name, value in dataclasses.asdict(record).items() if name in names}
    return json.dumps(values, default=str)


def from_text(kind: type[Record], text: str) -> Record:
    """Return what ``to_text`` wrote. Raises RecordError for all else."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise RecordError(f"is no JSON ({error})") from None
    return read_record(kind, data)


def _fitting(kinds: list[Any], value: Any) -> Any:
    """Return the dataclass of ``kinds`` that has the fields of the JSON value, or the first of them."""
    names = value.keys() if isinstance(value, dict) else ()
    records = filter(dataclasses.is_dataclass, kinds)
    return next((each for each in records if {field.name for field in dataclasses.fields(each)} == names), kinds[0])


def _value(kind: Any, value: Any) -> Any:
    """A field's value of the JSON value; raises RecordError unless it is of the type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if NoneType in arguments:
        others = [each for each in arguments if each is not NoneType]
        return None if value is None else _value(_fitting(others, value), value)
    if origin is Literal and value in arguments:
        return value
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
    elif kind is Path and isinstance(value, str):
        return Path(value)
    elif kind in (bool, int, str) and type(value) is kind and not (kind is str and _SURROGATE.search(value)):
        return value
    raise RecordError(IMPOSSIBLE)
