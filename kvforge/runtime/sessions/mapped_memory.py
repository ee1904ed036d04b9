"""Host memory that the kernels of a GPU read where it lies."""

import weakref

import torch
from torch import Tensor

from kvforge.common.errors import EngineError
from kvforge.runtime.sessions.huge_pages import huge_page_memory

_PORTABLE, _MAPPED = 1, 2  # cudaHostRegister's flags


class _MappedBytes:
    """Registered host memory as CUDA's array interface describes it; torch takes it over without a copy."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.__cuda_array_interface__ = {
            "shape": (memory.numel(),),
            "typestr": "|u1",
            "data": (memory.data_ptr(), False),
            "version": 3,
        }


def mapped_host_memory(num_bytes: int, device: str | torch.device = "cpu") -> Tensor:
    """Return zeroed main memory, uint8 ``[num_bytes]``; where ``device`` is a GPU, as a tensor of that device whose
    elements stay in main memory, locked there and mapped for the GPU until the last view of the tensor is gone.

    Unlike torch's pinned memory, which is rounded up to a power of two, it has the bytes asked for. What it does for
    a GPU has not been run: it takes one that addresses registered memory as the host does, as on 64-bit Linux.

    Raises:
        MemoryError: there is not so much main memory.
        EngineError: it cannot be locked.
    """
    memory = huge_page_memory(num_bytes)
    if torch.device(device).type == "cpu" or num_bytes == 0:
        return memory.to(device)
    runtime = torch.cuda.cudart()
    error = int(runtime.cudaHostRegister(memory.data_ptr(), num_bytes, _PORTABLE | _MAPPED))
    if error:
        raise EngineError(
            f"{num_bytes / 2**30:.3g} GiB of main memory cannot be locked for the GPU (CUDA error {error}); give the "
            "cache fewer state pages, or raise the limit of locked memory (ulimit -l)."
        )
    owner = _MappedBytes(memory)  # the tensor holds it
    weakref.finalize(owner, runtime.cudaHostUnregister, memory.data_ptr()).atexit = False
    return torch.as_tensor(owner, device=device)
