"""Memory that a training step, or a step of an engine, frees and asks for again."""

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
"""Of mallopt(3)."""
LARGEST = 2**31 - 1


def keep_freed_memory(largest: int = LARGEST) -> None:
    """Let this process keep what it frees: blocks of up to ``largest`` bytes, and at most four times that at the end of
    its heap. glibc gives large blocks back at once, so that every temporary is mapped anew, page by page: a third of a
    training step on a CPU, a tenth of a prompt. Nothing happens with another C library."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        if not mallopt(M_MMAP_THRESHOLD, largest):  # which older versions have at most 32 MiB
            mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, min(4 * largest, LARGEST))
