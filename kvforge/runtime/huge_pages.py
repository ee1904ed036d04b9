"""Main memory in large pages: what a step reads whole is read up to twice as fast as from pages of 4 KiB."""

import contextlib
import mmap

import torch
from torch import Tensor


def huge_page_memory(num_bytes: int) -> Tensor:
    """Return zeroed memory, uint8 ``[num_bytes]``, which Linux is asked to give in pages of 2 MiB; as ever it takes
    none before the first access.

    Raises:
        MemoryError: there is not so much.
    """
    try:
        memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{num_bytes} bytes cannot be allocated") from error
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]
