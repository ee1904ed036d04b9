"""What the operators' random cases share; `plugins/<operator>/cases.py` makes them, awkward shapes included.

What an operator must not read or use is poison: NaN in unused slots of the pools and scales, arbitrary numbers
in unused entries of tables. `small=True` keeps shapes small, for backends that run slowly; `dtypes` are the float
dtypes to choose from, `formats` the formats of the cache.
"""

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from plugins.kv_quantization import INT4, LARGEST, stored_dim

HEAD_DIMS = (64, 80, 96, 128, 256, 32, 48, 20)
SMALL_HEAD_DIMS = (16, 20, 32, 64)
PAGE_SIZES = (1, 16, 32, 100)
DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class CacheFormat:
    """What pools hold: `dtype` None is the float dtype of the case; `dynamic` means a scale per token and head. Where
    `v_dtype` is given, it is V's alone."""

    dtype: torch.dtype | None = None
    dynamic: bool = False
    v_dtype: torch.dtype | None = None

    def pair(self, default: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
        """The dtypes of K's and of V's pool; `default` is the float dtype of the case."""
        dtype = self.dtype or default
        return dtype, self.v_dtype or dtype


FLOAT = CacheFormat()
FORMATS = (
    FLOAT,
    CacheFormat(torch.float8_e4m3fn, dynamic=True),
    CacheFormat(torch.float8_e4m3fn),
    CacheFormat(torch.int8, dynamic=True),
    CacheFormat(torch.int8),
)
ALL_FORMATS = (*FORMATS, CacheFormat(INT4, dynamic=True))
"""With that of RopePagedKvWrite and PagedAttention alone."""
K8V4 = CacheFormat(torch.int8, dynamic=True, v_dtype=INT4)
MIXED_FORMATS = (K8V4, CacheFormat(INT4, dynamic=True, v_dtype=torch.int8))
"""Those of K and V apart, which these two read on CPUs."""


def may_rotate(cache: CacheFormat) -> bool:
    """Whether these two can be told that keys are rotated."""
    return cache.dtype == torch.int8 and cache.dynamic


def poison(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """NaN where the dtype has one, else the largest value."""
    worst = {torch.int8: 127.0, INT4: 0x77}.get(dtype, float("nan"))
    return torch.full(shape, worst, dtype=torch.float32).to(dtype)


def paged_pools(
    shape: tuple[int, ...], cache: CacheFormat, default: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    pools = [poison((*shape[:3], stored_dim(shape[3], dtype)), dtype) for dtype in cache.pair(default)]
    scales = [poison(shape[:3], torch.float32) if cache.dynamic else None for _ in range(2)]
    return pools[0], pools[1], scales[0], scales[1]


def static_scales(rng: random.Random, cache: CacheFormat) -> tuple[float, float]:
    """Powers of two times odd factors, some small enough to saturate."""
    if cache.dtype is None or cache.dynamic:
        return 1.0, 1.0
    largest = LARGEST[cache.dtype]
    return rng.uniform(1.5, 6.0) / largest, rng.uniform(1.5, 6.0) / largest
