"""What is compiled of scaled_add without a GPU."""

from collections.abc import Iterator

from plugins.scaled_add import cuda

from plugins.triton_kernel import KernelSpec


def kernel_specs(capability: int, full: bool) -> Iterator[KernelSpec]:
    """Specialisations for this compute capability (90: 9.0): a representative few, or many."""
    yield cuda.kernel_spec(0.5)
