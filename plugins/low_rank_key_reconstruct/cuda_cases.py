"""What is compiled of low_rank_key_reconstruct without a GPU."""

from collections.abc import Iterator

from plugins.low_rank_key_reconstruct import cuda
from plugins.triton_kernel import KernelSpec
from plugins.triton_specs import floats


def kernel_specs(capability: int, full: bool) -> Iterator[KernelSpec]:
    """Specialisations for this compute capability (90: 9.0): a representative few, or many."""
    for dtype in floats(full):
        yield cuda.kernel_spec(dtype, 64, 8, 256, 8, 160, 128)
