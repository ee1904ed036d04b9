"""What the operators' benchmarks share; `plugins/<operator>/bench.py` makes them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from plugins.kv_quantization import INT4, dynamic_scale, quantize
from plugins.kv_rotation import rotate_blocks

PAGE_SIZE = 32
KV_DTYPES: dict[str, tuple[torch.dtype, torch.dtype] | None] = {
    "same": None,
    "fp8": (torch.float8_e4m3fn, torch.float8_e4m3fn),
    "int8": (torch.int8, torch.int8),
    "int4": (INT4, INT4),
    "k8v4": (torch.int8, INT4),
}
"""What K's and V's pools hold, by the cache's name; None is the dtype of the case."""
DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Benchmark:
    """One case: `runs` are what is timed, by the name of their column, `kvforge_ms` the operator.

    The floor is the longer of `flops` at the rate of a matrix product in `dtype` and of `num_bytes` at that of a copy.
    """

    case: str
    runs: Mapping[str, Callable[[], Any]]
    num_bytes: float = 0
    flops: float = 0
    dtype: torch.dtype = torch.bfloat16

    def floor_ms(self, rates: Mapping[str, float]) -> float:
        """`rates`: GFLOP/s of products by dtype, and GB/s of a copy. Where bfloat16's are slower than float32's, these
        count."""
        by_bytes = self.num_bytes / rates["copy_gb_per_s"] / 1e6
        gflops = max(rates["gemm_float32_gflops"], rates[f"gemm_{str(self.dtype)[6:]}_gflops"])
        return max(self.flops / gflops / 1e6, by_bytes)


Benchmarks = Iterator[tuple[str, Callable[[], Benchmark]]]
"""A word by which a case is chosen, and what makes it."""


def on_cache(kv_dtype: str) -> str:
    """How a case's name says what the cache holds."""
    return "" if kv_dtype == "same" else f" on {kv_dtype}"


Pool = tuple[torch.Tensor, torch.Tensor | None]
"""Numbers and, of a quantized cache, their scales."""


def caches(vectors: Iterable[torch.Tensor], kv_dtype: str) -> tuple[Pool, Pool]:
    """The pools that hold these vectors, K's and V's."""
    keys, values = vectors
    k_dtype, v_dtype = KV_DTYPES[kv_dtype] or (None, None)
    return _pool(keys, k_dtype), _pool(values, v_dtype)


def _pool(vectors: torch.Tensor, dtype: torch.dtype | None) -> Pool:
    if dtype is None:
        return vectors, None
    vectors = rotate_blocks(vectors) if dtype == INT4 else vectors
    scales = dynamic_scale(vectors, dtype)
    return quantize(vectors, scales[..., None], dtype), scales


def bytes_of_head(*pools: torch.Tensor | None) -> int:
    """What a token and head keep in these, `[pages, page_size, kv_heads, ...]`."""
    return sum(pool[0, 0, 0].nbytes for pool in pools if pool is not None)
