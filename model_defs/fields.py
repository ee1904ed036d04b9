"""Reading one field of a ``config.json``: its type, and the range that any model of today lies well within."""

import reprlib
from collections.abc import Mapping
from typing import Any

from model_defs.errors import ModelError

MAX_FIELD = {
    "vocab_size": 2**24,
    "hidden_size": 2**18,
    "intermediate_size": 2**20,
    "num_hidden_layers": 2**12,
    "num_attention_heads": 2**12,
    "num_key_value_heads": 2**12,
    "head_dim": 2**12,
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 2**14),
    "max_position_embeddings": 2**27,
    "original_max_position_embeddings": 2**27,
}
"""The most that a field may say; one that is not here ends where int32 does, which positions are."""


def require_int(fields: Mapping[str, Any], name: str, minimum: int = 1) -> int:
    """Return the integer field ``name``; raises ModelError when it is missing, no integer or out of range."""
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ModelError(f"config.json needs an integer {name}, found {reprlib.repr(value)}.")
    maximum = MAX_FIELD.get(name, 2**31 - 1)
    if not minimum <= value <= maximum:
        raise ModelError(f"{name} is {reprlib.repr(value)} in config.json; it must be from {minimum} to {maximum}.")
    return value


def optional_int(fields: Mapping[str, Any], name: str, otherwise: int, minimum: int = 1) -> int:
    """Return the integer field ``name``, or ``otherwise`` where it is absent or null; raises ModelError."""
    return otherwise if fields.get(name) is None else require_int(fields, name, minimum)


def optional_flag(fields: Mapping[str, Any], name: str, otherwise: bool = False) -> bool:
    """Return the boolean field ``name``, or ``otherwise`` where it is absent or null; raises ModelError."""
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise ModelError(f"{name} is {reprlib.repr(value)} in config.json; it must be true or false.")
    return otherwise if value is None else value


def number(value: object, name: str, minimum: float, maximum: float) -> float:
    """Return ``value`` as a float; raises ModelError unless it is from ``minimum`` to ``maximum``, NaN excluded."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ModelError(f"{name} is {reprlib.repr(value)} in config.json; it must be a number.")
    if not minimum <= value <= maximum:  # NaN is neither
        raise ModelError(
            f"{name} is {reprlib.repr(value)} in config.json; it must be a number from {minimum:g} to {maximum:g}."
        )
    return float(value)


def token_ids(fields: Mapping[str, Any], name: str, vocab_size: int, file: str = "config.json") -> tuple[int, ...]:
    """Return the field ``name``, which may be absent, null, one id or a list, as a tuple.

    Ids the model cannot produce (such as -1) are left out; raises ModelError for what is no integer.
    """
    value = fields.get(name)
    ids = value if isinstance(value, (list, tuple)) else () if value is None else (value,)
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise ModelError(f"{name} is {reprlib.repr(value)} in {file}; it must be a token id or a list of them.")
    return tuple(dict.fromkeys(token for token in ids if 0 <= token < vocab_size))
