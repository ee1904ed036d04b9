"""What is compiled of speculative_verify without a GPU, and how it is launched in tests."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from plugins.speculative_verify import cuda
from plugins.triton_kernel import KernelSpec


def kernel_specs(capability: int, full: bool) -> Iterator[KernelSpec]:
    """Specialisations for this compute capability (90: 9.0): a representative few, or many."""
    for vocab in (128256, 32000, 1664) if full else (32000,):
        yield cuda.kernel_spec(vocab)


def launches(seed: int, args: tuple) -> Iterator[Callable[..., Any]]:
    """In blocks that are smaller than the vocabulary."""
    yield functools.partial(cuda.launch, block=16)
