"""The formats of numbers in weights and caches, by the names that options and manifests have for them."""

from dataclasses import dataclass
from typing import Literal

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}
WEIGHT_BYTES = {**ELEMENT_BYTES, "int8": 1}
"""Bytes of a linear layer's weight, by a manifest's ``weight_dtype``."""
SCALE_BYTES = 4


@dataclass(frozen=True)
class KVFormat:
    """How the cache stores a number: in ``element_bytes`` bytes, times a scale that is ``dynamic`` (float32, one per
    token and head, in pools of its own), ``static`` (one per owner, in the manifest) or there is ``none``."""

    element_bytes: int
    scales: Literal["none", "dynamic", "static"] = "none"


KV_FORMATS = {
    "float32": KVFormat(4),
    "bfloat16": KVFormat(2),
    "fp8": KVFormat(1, "dynamic"),
    "int8": KVFormat(1, "dynamic"),
    "fp8_static": KVFormat(1, "static"),
    "int8_static": KVFormat(1, "static"),
}
