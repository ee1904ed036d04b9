"""Reading what a ``quantization_config`` says."""

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from kvforge.common.errors import CheckpointError


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
