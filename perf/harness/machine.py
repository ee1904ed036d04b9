"""The machine a number was measured on, in words."""

import contextlib
import os
import platform
import time
from pathlib import Path

import torch

from kvforge.common.hardware import ISA_NAMES, best_isa


def describe_cpu() -> str:
    """Architecture, the processor's name, and the best of what its kernels use."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return ", ".join(part for part in (platform.machine(), name, ISA_NAMES[best_isa()]) if part)


def third_level_bytes(cpus: Path = Path("/sys/devices/system/cpu")) -> int:
    """The size of all third-level caches of the CPUs that this process may use; 0 where Linux does not say."""
    sizes: dict[str, int] = {}
    for cpu in os.sched_getaffinity(0):
        cache = cpus / f"cpu{cpu}" / "cache/index3"
        with contextlib.suppress(OSError, ValueError):
            kibibytes = (cache / "size").read_text().strip().removesuffix("K")
            sizes[(cache / "shared_cpu_list").read_text()] = int(kibibytes) << 10
    return sum(sizes.values())


def describe_machine() -> str:
    """Processor, cores and torch's version, with the date."""
    cores = len(os.sched_getaffinity(0))
    return f"{time.strftime('%Y-%m-%d')}, {describe_cpu()}, {cores} cores, torch {torch.__version__}"


def describe_threads() -> str:
    """Processor, torch's threads and its version."""
    return f"{describe_cpu()}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def machine_fields() -> dict[str, str]:
    """Architecture and torch's version, as the fields of a report."""
    return {"machine": platform.machine(), "torch": torch.__version__}
