"""What is compiled of paged_attention without a GPU, and how it is launched in tests."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from plugins.paged_attention.cuda import AttentionShape, combine_spec, launch, layout_of, partial_spec
from plugins.paged_attention.cuda_tuning import Blocks, Tuning
from plugins.triton_cache import PoolLayout
from plugins.triton_kernel import KernelSpec
from plugins.triton_specs import BF16, INT8, caches_with_int4, query_dtype

HEADS = ((1, 32, 128), (7, 4, 128), (8, 8, 128), (32, 1, 128), (16, 1, 256), (3, 2, 20))
"""Other heads: queries per KV head, KV heads, head dim."""
SMALL = Tuning(Blocks(16, 16, 4, 2), Blocks(16, 16, 4, 2), num_splits=4, min_split=16)
"""Small blocks: small cases have several of them."""


def kernel_specs(capability: int, full: bool) -> Iterator[KernelSpec]:
    """Specialisations for this compute capability (90: 9.0): a representative few, or many."""
    for cache in caches_with_int4(capability, full):
        shape = AttentionShape(cache, query_dtype(cache), 4 * cache.kv_heads, 0.1)
        tuning = shape.tuning(capability)
        yield partial_spec(shape, tuning)
        yield combine_spec(shape, tuning)
        if full and cache.head_dim == 128 and cache.page_size >= 16:
            yield combine_spec(shape, replace(tuning, num_splits=0))
            windowed = replace(shape, window=4096)
            yield partial_spec(windowed, tuning)
            yield combine_spec(windowed, tuning)
    for group, kv_heads, head_dim in HEADS if full else ():
        for cache in (PoolLayout(BF16, 64, kv_heads, head_dim), PoolLayout(INT8, 64, kv_heads, head_dim, True)):
            shape = AttentionShape(cache, BF16, group * kv_heads, 0.1)
            yield partial_spec(shape, shape.tuning(capability))
            yield combine_spec(shape, shape.tuning(capability))


def launches(seed: int, args: tuple) -> Iterator[Callable[..., Any]]:
    """With and without split-KV decode, in blocks that cut tiles, pages and windows differently."""
    tunings = [
        replace(SMALL, decode=Blocks(16, 16 if seed % 3 else 32, 4, 2)),
        replace(SMALL, prefill=Blocks(32 if seed % 2 else 64, 32, 4, 2), num_splits=0),
    ]
    if seed % 8 == 0:
        tunings.append(AttentionShape(layout_of(*args[1:3], *args[8:]), args[0].dtype, args[0].shape[1], 1).tuning())
    for tuning in tunings:
        yield functools.partial(launch, tuning=tuning)
