"""What is compiled of attention_mass without a GPU, and how it is launched in tests."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from plugins.attention_mass.cuda import MassBlocks, MassShape, add_spec, launch, totals_spec
from plugins.attention_mass.reference import LARGEST_WEIGHT, SUM_AND_SQUARES
from plugins.triton_kernel import KernelSpec
from plugins.triton_specs import caches, query_dtype


def kernel_specs(capability: int, full: bool) -> Iterator[KernelSpec]:
    """Specialisations for this compute capability (90: 9.0): a representative few, or many."""
    for cache in caches(capability, full):
        for kind in range(LARGEST_WEIGHT + 1) if full else (SUM_AND_SQUARES,):
            shape = MassShape(cache, query_dtype(cache), 4 * cache.kv_heads, 0.1, kind)
            yield totals_spec(shape, shape.blocks)
            yield add_spec(shape, shape.blocks)


def launches(seed: int, args: tuple) -> Iterator[Callable[..., Any]]:
    """In small blocks, which small cases have several of, and in some cases in the usual ones."""
    yield functools.partial(launch, blocks=MassBlocks(16, 16) if seed % 2 else MassBlocks(32, 32))
    if seed % 8 == 0:
        yield launch
