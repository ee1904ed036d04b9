"""What is compiled of rope_paged_kv_write without a GPU."""

from collections.abc import Iterator

from plugins.rope_paged_kv_write import cuda
from plugins.triton_kernel import KernelSpec
from plugins.triton_specs import caches_with_int4, query_dtype


def kernel_specs(capability: int, full: bool) -> Iterator[KernelSpec]:
    """Specialisations for this compute capability (90: 9.0): a representative few, or many."""
    for cache in caches_with_int4(capability, full):
        yield cuda.kernel_spec(cache, query_dtype(cache))
