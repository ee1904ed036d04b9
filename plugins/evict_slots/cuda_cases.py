"""What is compiled of evict_slots without a GPU, and how it is launched in tests."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from plugins.evict_slots import cuda
from plugins.triton_kernel import KernelSpec
from plugins.triton_specs import caches


def kernel_specs(capability: int, full: bool) -> Iterator[KernelSpec]:
    """Specialisations for this compute capability (90: 9.0): a representative few, or many."""
    for cache in caches(capability, full):
        yield cuda.choose_spec(cache.page_size, cache.kv_heads)
        yield cuda.move_spec(cache, mass=True, squares=cache.dynamic)


def launches(seed: int, args: tuple) -> Iterator[Callable[..., Any]]:
    """Looking at few slots at once in some cases, as where there are many."""
    yield functools.partial(cuda.launch, block=(512, 16, 32)[seed % 3])
