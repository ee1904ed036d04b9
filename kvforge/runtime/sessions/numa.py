"""Memory spread over the NUMA nodes of a machine with several sockets.

Linux puts a page on the node of the thread that touches it first: of weights and caches, the one that loads. All others
would then read through one socket's memory and the link to it. Which thread reads a page changes with a step's tokens,
so pages go to all nodes in turn, and every thread reads at the mean of all rates.
"""

import ctypes
import os
import platform
from collections.abc import Sequence
from pathlib import Path

NODES = Path("/sys/devices/system/node")
_MBIND, _GET_MEMPOLICY = {"x86_64": (237, 239), "aarch64": (235, 236)}.get(platform.machine(), (None, None))
_MPOL_DEFAULT, _MPOL_INTERLEAVE, _MPOL_F_ADDR = 0, 3, 2
_BITS = 1024
"""Of a mask of nodes, as many as Linux can have."""


def nodes_in_use(folder: Path = NODES) -> list[int]:
    """Return the nodes that have memory and CPUs on which this process may run; none where Linux does not say."""
    try:
        allowed = os.sched_getaffinity(0)
        with_memory = _numbers((folder / "has_memory").read_text())
        cpus = {node: _numbers((folder / f"node{node}" / "cpulist").read_text()) for node in with_memory}
    except (OSError, ValueError, AttributeError):
        return []
    return sorted(node for node, own in cpus.items() if own & allowed)


def interleave(address: int, num_bytes: int, nodes: Sequence[int]) -> bool:
    """Have the pages of ``num_bytes`` from ``address``, the begin of a page, that nobody has touched go to ``nodes`` in
    turn. Returns whether they will: not where the process has a policy of its own, as numactl sets it, nor where Linux
    refuses."""
    if _MBIND is None or policy_of(None) != _MPOL_DEFAULT:
        return False
    mask = (ctypes.c_ulong * (_BITS // 64))()
    for node in nodes:
        mask[node // 64] |= 1 << (node % 64)
    length, bits = ctypes.c_ulong(num_bytes), ctypes.c_ulong(_BITS)
    return ctypes.CDLL(None).syscall(_MBIND, ctypes.c_void_p(address), length, _MPOL_INTERLEAVE, mask, bits, 0) == 0


def policy_of(address: int | None) -> int | None:
    """Return Linux's number of the policy of a page, or of this thread; None where it does not say."""
    mode, flags = ctypes.c_int(-1), 0 if address is None else _MPOL_F_ADDR
    if _GET_MEMPOLICY is None:
        return None
    no_mask, where = ctypes.c_ulong(0), ctypes.c_void_p(address)
    failed = ctypes.CDLL(None).syscall(_GET_MEMPOLICY, ctypes.byref(mode), None, no_mask, where, ctypes.c_ulong(flags))
    return None if failed else mode.value


def _numbers(ranges: str) -> set[int]:
    """Those of a list such as ``0-3,8``."""
    bounds = [part.split("-") for part in ranges.strip().split(",") if part]
    return {number for each in bounds for number in range(int(each[0]), int(each[-1]) + 1)}
