"""The formats of numbers in weights and caches, by the names that options and manifests have for them."""

from dataclasses import dataclass
from typing import Literal

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}
ALIASES = {"fp32": "float32", "f32": "float32", "bf16": "bfloat16", "fp8_e4m3": "fp8"}
"""Other names of formats, which options take."""
NEAREST = {
    **dict.fromkeys(("float16", "fp16", "f16", "half"), "bfloat16"),
    **dict.fromkeys(("q8_0", "fp8_e5m2", "w8a8"), "int8"),
    **dict.fromkeys(("q4_0", "q4_1", "q4_k_m", "iq4_nl", "awq", "gptq", "w4a16"), "int4"),
}
"""Formats of other programs by the nearest that options name."""
QUANTIZED_WEIGHT_BYTES = {"int8": 1, "int4": 17 / 32, "int4_scales": 18 / 32, "int4_zeros": 19 / 32}
"""Bytes of a weight of linear layers that are quantized when an engine is built. For each 32 weights int4 has a byte of
steps, ``int4_scales`` two bytes of a scale, ``int4_zeros`` a zero point of one byte besides."""
INT4_WEIGHTS = ("int4", "int4_scales", "int4_zeros")
"""Those in 4 bits: each keeps what the one before it does."""
WEIGHT_BYTES = {**ELEMENT_BYTES, **QUANTIZED_WEIGHT_BYTES}
"""Bytes of a linear layer's weight, by a manifest's ``weight_dtype``."""
HEAD_DTYPES = {"int4": "int4_scales"}
"""What the head's weights are where they are not as all others: few tokens meet them, which need no tiles, and rounding
shows most in the logits."""
SCALE_BYTES = 4
GROUP_SIZE, GROUP_BYTES = 32, 4
"""Numbers of a group in a grouped cache, and the bytes of its step and least number, two float16."""


def whole_name(name: str) -> str:
    """Return the name that manifests have for a format of one of the ALIASES; any other as it is."""
    return ALIASES.get(name, name)


def keeping_int4(asked: str, stored: str) -> str:
    """Return the weight dtype that becomes of ``asked`` where a checkpoint's weights in 4 bits need ``stored``, one of
    INT4_WEIGHTS: the later of the two, or ``asked`` where it is no such dtype."""
    return max(asked, stored, key=INT4_WEIGHTS.index) if asked in INT4_WEIGHTS else asked


Scales = Literal["none", "dynamic", "static", "grouped"]


@dataclass(frozen=True)
class NumberFormat:
    """How a number of K or of V is stored: in ``element_bits`` bits of a pool of ``torch_dtype``, torch's name, times a
    scale that is ``dynamic`` (float32, one per token and head, in pools of its own), ``static`` (one per owner, in the
    manifest) or there is ``none``. ``grouped`` numbers are stored in whole pages: GROUP_SIZE share GROUP_BYTES, of K in
    each channel, of V in each token."""

    torch_dtype: str
    element_bits: int
    scales: Scales = "none"

    def stored_dim(self, head_dim: int) -> int:
        """Return the elements of a pool that hold ``head_dim`` numbers, an even one: a byte holds two of 4 bits."""
        return head_dim // 2 if self.element_bits == 4 else head_dim


@dataclass(frozen=True)
class KVFormat:
    """How the cache stores K and V; the scales of both are of one kind."""

    keys: NumberFormat
    values: NumberFormat

    @property
    def element_bits(self) -> int:
        """Bits of a number, on average."""
        return (self.keys.element_bits + self.values.element_bits) // 2

    @property
    def scales(self) -> Scales:
        """Where the scales are."""
        return self.keys.scales

    @property
    def may_rotate_keys(self) -> bool:
        """Whether K is rotated, before it is rounded, where attention alone reads it; those of int4 always are."""
        return self.keys == _NUMBERS["int8"]

    @property
    def is_grouped(self) -> bool:
        """Whether only whole pages are stored so."""
        return self.scales == "grouped"

    def num_bytes(self, numbers: int) -> int:
        """Return the bytes of so many numbers, of whole heads and as many of K as of V."""
        return numbers * self.element_bits // 8


_NUMBERS = {
    "float32": NumberFormat("float32", 32),
    "bfloat16": NumberFormat("bfloat16", 16),
    "fp8": NumberFormat("float8_e4m3fn", 8, "dynamic"),
    "int8": NumberFormat("int8", 8, "dynamic"),
    "int4": NumberFormat("uint8", 4, "dynamic"),
    "fp8_static": NumberFormat("float8_e4m3fn", 8, "static"),
    "int8_static": NumberFormat("int8", 8, "static"),
    "kivi2": NumberFormat("uint8", 2, "grouped"),
    "kivi3": NumberFormat("uint8", 3, "grouped"),
    "kivi4": NumberFormat("uint8", 4, "grouped"),
}
KV_FORMATS = {
    **{name: KVFormat(both, both) for name, both in _NUMBERS.items()},
    "k8v4": KVFormat(_NUMBERS["int8"], _NUMBERS["int4"]),
}


def written_formats(kv_dtype: str, dtype: str) -> tuple[NumberFormat, NumberFormat]:
    """Return how the pools that a step writes store K and V, where ``kv_dtype`` is a key of ``KV_FORMATS``: those of a
    grouped cache are exact, in the ``dtype`` of the computation."""
    stored = KV_FORMATS[dtype if KV_FORMATS[kv_dtype].is_grouped else kv_dtype]
    return stored.keys, stored.values


def automatic_dtype(stored: str, has_quantized_weights: bool = False) -> str:
    """Return the dtype that a build computes in unless told otherwise, from safetensors' name of the stored weights'
    dtype: fp32 for fp32 weights, else bf16, as with weights that the build quantizes."""
    return "float32" if stored in ("F32", "F64") and not has_quantized_weights else "bfloat16"


def automatic_kv_dtype(dtype: str, kv_cache_algo: str | None) -> str:
    """Return the cache's format unless told otherwise: the static one that the checkpoint was calibrated for
    (``kv_cache_algo``: ``FP8``, ``INT8``, something that no engine has, or None), or the dtype of the computation."""
    return static_kv_dtype(kv_cache_algo) or dtype


def static_kv_dtype(kv_cache_algo: str | None) -> str | None:
    """Return the static format of an algorithm, None where no engine has it."""
    name = f"{kv_cache_algo}_static".lower()
    return name if name in KV_FORMATS else None
