"""What is compiled of chunk_cache_update without a GPU, and how it is launched in tests."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from plugins.chunk_cache_update import cuda
from plugins.triton_kernel import KernelSpec


def kernel_specs(capability: int, full: bool) -> Iterator[KernelSpec]:
    """Specialisations for this compute capability (90: 9.0): a representative few, or many."""
    for places in (256, 32, 5) if full else (256,):
        yield cuda.kernel_spec(8, places)


def launches(seed: int, args: tuple) -> Iterator[Callable[..., Any]]:
    """In steps of fewer chunks in some cases, as where there are many places."""
    yield functools.partial(cuda.launch, pairs=(1 << 14, 32, 8)[seed % 3])
