"""The KV caches that the Triton kernels are compiled for without a GPU: a representative few, or many."""

from collections.abc import Iterator

import torch

from plugins.kv_quantization import INT4
from plugins.triton_cache import PoolLayout

FP8, BF16, FP16, FP32, INT8 = torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32, torch.int8


def caches(capability: int, full: bool) -> Iterator[PoolLayout]:
    """Layouts that a GPU of this compute capability (90: 9.0) can have."""
    eight_bit = INT8 if capability < 89 else FP8
    yield PoolLayout(BF16, 64, 8, 128)  # Llama-3.1-8B
    yield PoolLayout(eight_bit, 16, 2, 64, dynamic=True)
    if not full:
        return
    yield from (PoolLayout(BF16, 32, 8, head_dim) for head_dim in (64, 80, 96, 256))
    yield from (PoolLayout(dtype, 16, 8, 128, False, 0.01, 0.02) for dtype in {eight_bit, INT8})
    yield from (PoolLayout(dtype, 16, 8, 128) for dtype in (FP16, FP32))
    yield from (PoolLayout(BF16, page, 8, 128) for page in (1, 100))
    yield PoolLayout(INT8, 16, 32, 128, dynamic=True)
    yield PoolLayout(eight_bit, 32, 8, 256, dynamic=True)


def caches_with_int4(capability: int, full: bool) -> Iterator[PoolLayout]:
    """The same, and those of int4, which RopePagedKvWrite and PagedAttention know."""
    yield from caches(capability, full)
    yield PoolLayout(INT4, 16, 8, 128, dynamic=True)
    yield from (PoolLayout(INT4, page, 2, head_dim, dynamic=True) for page, head_dim in ((64, 64), (100, 80)) if full)


def query_dtype(cache: PoolLayout) -> torch.dtype:
    """The dtype of the queries and keys that go with a cache."""
    return BF16 if cache.largest else cache.dtype


def floats(full: bool) -> tuple[torch.dtype, ...]:
    """The dtypes of operators without a cache."""
    return (FP32, FP16, BF16) if full else (BF16,)
