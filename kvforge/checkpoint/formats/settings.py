"""Reading what a ``quantization_config`` says."""

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from kvforge.common.errors import CheckpointError

WHOLE = 1 << 31
"""The size of a group that has all inputs of an output."""


def refuse(where: str, key: str, value: Any, supported: str) -> NoReturn:
    """Raise CheckpointError: ``where`` says something that is not supported."""
    raise CheckpointError(
        f"{where} says {key} {reprlib.repr(value)}; supported are {supported}, so use one of these or the unquantized "
        "checkpoint."
    )


def bits_of(where: str, settings: Mapping[str, Any], supported: Sequence[int]) -> int:
    """Return how many bits a weight has; raises CheckpointError unless they are ``supported``."""
    bits = settings.get("bits", settings.get("w_bit"))
    if isinstance(bits, bool) or bits not in supported:
        refuse(where, "bits", bits, " and ".join(map(str, supported)))
    return int(bits)


def is_size(value: Any) -> bool:
    """Whether it is a whole number above 0, and no more than a tensor has rows."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 31


def group_sizes_of(where: str, *found: Any) -> tuple[int, ...]:
    """Return the ``found`` sizes of groups, ``WHOLE`` for None and -1; raises CheckpointError for what is no size."""
    sizes = [WHOLE if size is None or size == -1 else size for size in found]
    for size in sizes:
        if size != WHOLE and not is_size(size):
            refuse(where, "group_size", size, "-1 and whole numbers above 0")
    return tuple(sorted(set(sizes)))
