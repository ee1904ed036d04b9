"""Memory that a training step frees and asks for again."""

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
"""Of mallopt(3)."""
LARGEST = 2**31 - 1


def keep_freed_memory() -> None:
    """Let this process keep what it frees. glibc gives large blocks back at once, so that every temporary is mapped
    anew, page by page: a third of a step on a CPU. Nothing happens with another C library."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        if not mallopt(M_MMAP_THRESHOLD, LARGEST):  # which older versions have at most 32 MiB
            mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, LARGEST)
