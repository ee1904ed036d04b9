"""What is compiled of landmark_select without a GPU, and how it is launched in tests."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from plugins.landmark_select import cuda
from plugins.triton_kernel import KernelSpec
from plugins.triton_specs import floats


def kernel_specs(capability: int, full: bool) -> Iterator[KernelSpec]:
    """Specialisations for this compute capability (90: 9.0): a representative few, or many."""
    for dtype in floats(full):
        yield cuda.scores_spec(dtype, 8, 8, 32, 128, 0.1)
    for heads, max_selected in ((32, 256), (8, 64), (64, 1)) if full else ((32, 256),):
        yield cuda.choose_spec(8, heads, max_selected)


def launches(seed: int, args: tuple) -> Iterator[Callable[..., Any]]:
    """In blocks that are smaller than the chunks."""
    yield functools.partial(cuda.launch, block=16)
