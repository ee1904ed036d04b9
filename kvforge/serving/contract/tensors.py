"""Reads single values out of a request's input tensors; every refusal names the tensor."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvforge.runtime.requests.checks import check_count
from kvforge.serving.contract.inputs import FIELDS, refuse

Tensors = Mapping[str, np.ndarray]


def scalar(tensors: Tensors, name: str, row: int, default: Any) -> Any:
    """The one value of a [batch, 1] tensor as a Python number or bytes, or `default` when it was not sent."""
    if name not in tensors:
        return default
    values = tensors[name][row].reshape(-1)
    if values.size != 1:
        raise refuse(name, f"must hold one value, not {values.size}")
    value = values[0]
    return value.item() if isinstance(value, np.generic) else value


def check_entries(name: str, count: int, maximum: int) -> None:
    """Raise RequestError where `count` entries of a tensor are more than `maximum`."""
    check_count(FIELDS.get(name, name), count, maximum)


def vector(tensors: Tensors, name: str, row: int, maximum: int) -> list:
    """The values of a [batch, n] tensor as Python numbers or bytes, none when it was not sent. Raises RequestError for
    more than `maximum`."""
    if name not in tensors:
        return []
    values = tensors[name][row].reshape(-1)
    check_entries(name, values.size, maximum)
    return values.tolist()


def text(name: str, value: Any) -> str:
    """A STRING element as text. Raises RequestError where it is not UTF-8."""
    try:
        decoded = value.decode() if isinstance(value, bytes) else str(value)
        decoded.encode()
    except UnicodeError as error:
        raise refuse(name, f"is not valid UTF-8: {error}") from None
    return decoded


def texts(tensors: Tensors, name: str, row: int, maximum: int) -> list[str]:
    """The non-empty texts of a [batch, n] STRING tensor, as `vector` has them."""
    decoded = (text(name, value) for value in vector(tensors, name, row, maximum))
    return [value for value in decoded if value]
