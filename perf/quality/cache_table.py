"""The formats of a cache that ``perf.quality.cache_formats`` compares: each a row of ``FORMATS``."""

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from perf.quality.cache_codecs import (
    Codec,
    Fit,
    asymmetric,
    by_channel,
    e4m3,
    nuq_by_channel,
    nuq_by_token,
    nvfp4,
    rotated,
    symmetric,
)  # fmt: skip

HEAD, TOKEN = 0, -1
"""Numbers that share scales: those of a head, and those of all heads of a token."""
KIVI_GROUP = 32


@dataclass(frozen=True)
class CacheFormat:
    """How K and V are stored: what makes their codecs of calibration data, and what it costs.

    A number has ``bits``, on average over K and V, and ``group`` of them (or HEAD, TOKEN) share ``scale_bits``. Keys
    are stored as they are ``before_rope`` or rotated. A query reads the tokens of its own ``residual`` positions
    exactly; these are not counted.
    """

    keys: Fit
    values: Fit
    bits: float
    scale_bits: float = 0
    group: int = HEAD
    before_rope: bool = False
    residual: int = 0

    def bits_per_number(self, kv_heads: int, head_dim: int) -> float:
        """Return the bits of a number of K or V with its share of scales."""
        numbers = {HEAD: head_dim, TOKEN: kv_heads * head_dim}.get(self.group, self.group)
        return self.bits + self.scale_bits / numbers


def _always(codec: Codec) -> Fit:
    def fit(data: Tensor) -> Codec:
        return codec

    return fit


def _both(codec: Codec, bits: float, scale_bits: float = 0, group: int = HEAD) -> CacheFormat:
    return CacheFormat(_always(codec), _always(codec), bits, scale_bits, group)


def _kivi(bits: int, residual: int = KIVI_GROUP, values_rotated: bool = False, fitted: bool = False) -> CacheFormat:
    """KIVI (arXiv 2402.02750): keys by channel, values by token, two float16 a group; the newest ``residual`` tokens
    exact, of which the paper has 128."""
    keys = partial(by_channel, bits=bits, group=KIVI_GROUP, fitted=fitted)
    values = partial(asymmetric, bits=bits, group=KIVI_GROUP, fitted=fitted)
    stored = rotated(values) if values_rotated else values
    return CacheFormat(_always(keys), _always(stored), bits, 32, KIVI_GROUP, residual=residual)


def _nuq(outliers: float) -> CacheFormat:
    """KVQuant; an outlier costs 32 bits, a token's values two float16."""
    keys, values = (partial(fit, outliers=outliers) for fit in (nuq_by_channel, nuq_by_token))
    return CacheFormat(keys, values, 4 + 32 * outliers, 16, TOKEN, before_rope=True)


INT8 = partial(symmetric, largest=127)
INT4, INT4_GROUPS = partial(symmetric, largest=7), partial(symmetric, largest=7, group=32)
INT4_BETWEEN = partial(asymmetric, bits=4)
FORMATS = {
    "bf16": _both(lambda x: x.bfloat16().float(), 16), "fp8": _both(e4m3, 8, 32), "int8": _both(INT8, 8, 32),
    "int8 keys, int4 values rotated": CacheFormat(_always(INT8), _always(rotated(INT4)), 6, 32),
    "int4": _both(INT4, 4, 32), "int4, rotated": _both(rotated(INT4), 4, 32),
    "int4 asymmetric": _both(INT4_BETWEEN, 4, 64), "int4 asymmetric, rotated": _both(rotated(INT4_BETWEEN), 4, 64),
    "int4 groups of 32": _both(INT4_GROUPS, 4, 16, 32),
    "int4 groups of 32, rotated": _both(rotated(INT4_GROUPS), 4, 16, 32), "nvfp4": _both(nvfp4, 4, 8, 16),
    "nvfp4, rotated": _both(rotated(nvfp4), 4, 8, 16), "nuq4": _nuq(0.0), "nuq4, 1% outliers": _nuq(0.01),
    "KIVI-4": _kivi(4), "KIVI-2": _kivi(2), "KIVI-2, 64 exact": _kivi(2, 64), "KIVI-2, 128 exact": _kivi(2, 128),
    "KIVI-2, values rotated": _kivi(2, values_rotated=True), "KIVI-2, fitted": _kivi(2, fitted=True),
    "KIVI-2, fitted, 64 exact": _kivi(2, 64, fitted=True), "KIVI-2, fitted, 128 exact": _kivi(2, 128, fitted=True),
    "int2 groups of 32, rotated, fitted": _both(rotated(partial(asymmetric, bits=2, group=32, fitted=True)), 2, 32, 32),
    "int2 groups of 32, rotated": _both(rotated(partial(asymmetric, bits=2, group=32)), 2, 32, 32),
}  # fmt: skip
