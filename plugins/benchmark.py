"""What the operators' benchmarks share; `plugins/<operator>/bench.py` makes them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from plugins.kv_quantization import INT4, dynamic_scale, quantize
from plugins.kv_rotation import rotate_blocks

PAGE_SIZE = 32
KV_DTYPES = {"same": None, "fp8": torch.float8_e4m3fn, "int8": torch.int8, "int4": INT4}
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


def cache(values: torch.Tensor, kv_dtype: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The pool that holds these vectors, and its scales."""
    dtype = KV_DTYPES[kv_dtype]
    if dtype is None:
        return values, None
    values = rotate_blocks(values) if dtype == INT4 else values
    scales = dynamic_scale(values, dtype)
    return quantize(values, scales[..., None], dtype), scales
