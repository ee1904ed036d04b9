"""Specialisations of every Triton kernel: a representative few, or many."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from plugins.chunk_cache_update import cuda as chunk_cache
from plugins.landmark_select import cuda as select
from plugins.low_rank_key_reconstruct import cuda as low_rank
from plugins.paged_attention.cuda import AttentionShape, combine_spec, partial_spec
from plugins.rope_paged_kv_write import cuda as kv_write
from plugins.selected_kv_write import cuda as selected_write
from plugins.speculative_verify import cuda as verify
from plugins.triton_cache import CacheLayout
from plugins.triton_kernel import KernelSpec

FP8, BF16, FP16, FP32, INT8 = torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32, torch.int8


HEADS = ((1, 32, 128), (7, 4, 128), (8, 8, 128), (32, 1, 128), (16, 1, 256), (3, 2, 20))
"""Other heads: queries per KV head, KV heads, head dim."""


def caches(capability: int, full: bool) -> Iterator[CacheLayout]:
    eight_bit = INT8 if capability < 89 else FP8
    yield CacheLayout(BF16, 64, 8, 128)  # Llama-3.1-8B
    yield CacheLayout(eight_bit, 16, 2, 64, dynamic=True)
    if not full:
        return
    yield from (CacheLayout(BF16, 32, 8, head_dim) for head_dim in (64, 80, 96, 256))
    yield from (CacheLayout(dtype, 16, 8, 128, False, 0.01, 0.02) for dtype in {eight_bit, INT8})
    yield from (CacheLayout(dtype, 16, 8, 128) for dtype in (FP16, FP32))
    yield from (CacheLayout(BF16, page, 8, 128) for page in (1, 100))
    yield CacheLayout(INT8, 16, 32, 128, dynamic=True)
    yield CacheLayout(eight_bit, 32, 8, 256, dynamic=True)


def kernel_specs(capability: int, full: bool) -> Iterator[KernelSpec]:
    """Specs that compile for this compute capability (90: 9.0)."""
    for cache in caches(capability, full):
        dtype = BF16 if cache.largest else cache.dtype
        yield kv_write.kernel_spec(cache, dtype)
        shape = AttentionShape(cache, dtype, 4 * cache.kv_heads, 0.1)
        tuning = shape.tuning(capability)
        yield partial_spec(shape, tuning)
        yield combine_spec(shape, tuning)
        if full and cache.head_dim == 128 and cache.page_size >= 16:
            yield combine_spec(shape, replace(tuning, num_splits=0))
            windowed = replace(shape, window=4096)
            yield partial_spec(windowed, tuning)
            yield combine_spec(windowed, tuning)
    if full:
        for group, kv_heads, head_dim in HEADS:
            for cache in (CacheLayout(BF16, 64, kv_heads, head_dim), CacheLayout(INT8, 64, kv_heads, head_dim, True)):
                shape = AttentionShape(cache, BF16, group * kv_heads, 0.1)
                yield partial_spec(shape, shape.tuning(capability))
                yield combine_spec(shape, shape.tuning(capability))
    for dtype in (FP32, FP16, BF16) if full else (BF16,):
        yield low_rank.kernel_spec(dtype, 8, 160, 128)
    for vocab in (128256, 32000, 1664) if full else (32000,):
        yield verify.kernel_spec(vocab)
    for dtype in (FP32, FP16, BF16) if full else (BF16,):
        yield select.scores_spec(dtype, 8, 8, 32, 128, 0.1)
        yield selected_write.kernel_spec(dtype, 64, 8, 256, 8, 160, 128)
    for heads, max_selected in ((32, 256), (8, 64), (64, 1)) if full else ((32, 256),):
        yield select.choose_spec(8, heads, max_selected)
    for places in (256, 32, 5) if full else (256,):
        yield chunk_cache.kernel_spec(8, places)
