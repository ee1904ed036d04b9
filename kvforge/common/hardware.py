"""What this machine's CPU can run, read without importing torch."""

import platform
from pathlib import Path

_VECTOR_EXTENSIONS = (
    "avx",
    "fma",
    "f16c",
    "avx2",
    "bmi1",
    "bmi2",
    "avx512",
    "avx_",
    "amx",
    "sve",
    "asimd",
    "bf16",
    "i8mm",
    "vaes",
    "gfni",
    "sha_ni",
)

AVX512_KERNELS = frozenset(
    ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni", "avx512vbmi")
)  # as plugins/native/isa.cpp
"""What the AVX512-BF16 kernels need; on a CPU that lacks one of them AVX2's or the portable ones run."""

AMX_KERNELS = AVX512_KERNELS | {"amx_tile", "amx_bf16", "amx_int8"}
"""What AMX's kernels need."""

ISA_NAMES = {"amx": "AMX", "avx512": "AVX512-BF16", "avx2": "AVX2", "portable": "portable"}
"""The variants of the kernels as ``KVFORGE_CPU_ISA`` names them, and in words."""


def cpu_isa() -> tuple[str, ...]:
    """Return the architecture and the sorted vector extensions, e.g. ``("x86_64", "avx", "avx2", …)``.

    Machine code compiled for this CPU runs on any CPU of the same architecture that has these extensions.
    """
    flags: set[str] = set()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                flags = set(line.partition(":")[2].split())
                break
    except OSError:
        pass
    return (platform.machine(), *sorted(flag for flag in flags if flag.startswith(_VECTOR_EXTENSIONS)))


def best_isa() -> str:
    """Return the best variant of the kernels for this CPU, a key of ``ISA_NAMES``."""
    flags = set(cpu_isa())
    needed = {"amx": AMX_KERNELS, "avx512": AVX512_KERNELS, "avx2": {"avx2", "fma"}}
    return next((name for name, extensions in needed.items() if flags >= extensions), "portable")


def has_avx512_kernels() -> bool:
    """Whether this CPU runs the kernels for AVX512-BF16."""
    return set(cpu_isa()) >= AVX512_KERNELS


def available_memory_bytes() -> int:
    """Return the memory that can be allocated now, honouring a cgroup limit; 0 if unknown."""
    available = 0
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
                break
    except OSError:
        return 0
    limit, usage = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    try:
        if (text := limit.read_text().strip()) != "max":
            available = min(available, max(0, int(text) - int(usage.read_text())))
    except (OSError, ValueError):
        pass
    return available
