"""What is compiled of selected_kv_write without a GPU, and how it is launched in tests."""

from collections.abc import Callable, Iterator
from typing import Any

from plugins.selected_kv_write import cuda, cuda_place
from plugins.triton_kernel import KernelSpec
from plugins.triton_specs import floats


def kernel_specs(capability: int, full: bool) -> Iterator[KernelSpec]:
    """Specialisations for this compute capability (90: 9.0): a representative few, or many."""
    for dtype in floats(full):
        yield cuda.kernel_spec(dtype, 64, 8, 256, 8, 160, 128)
        yield cuda_place.place_spec(dtype, 64, 8, 256, 8, 128)


def launches(seed: int, args: tuple) -> Iterator[Callable[..., Any]]:
    """In one kernel, and in the two of TensorRT's plans."""
    yield cuda.launch
    yield cuda_place.launch_in_steps
