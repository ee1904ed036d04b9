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

_AVX2 = frozenset(("avx2", "fma"))
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
_AVX512_VNNI = _AVX512 | {"avx512_vnni"}
_AVX512_BF16 = _AVX512_VNNI | {"avx512_bf16", "avx512vbmi"}
_AMX = _AVX512_BF16 | {"amx_tile", "amx_bf16", "amx_int8", "avx512_fp16"}

ISA_EXTENSIONS: dict[str, frozenset[str]] = {
    "portable": frozenset(),
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512_vnni": _AVX512_VNNI,
    "avx512_bf16": _AVX512_BF16,
    "amx": _AMX,
}  # as plugins/native/isa.cpp
"""What each variant of the kernels, as ``KVFORGE_CPU_ISA`` names it, needs; each has the instructions of those before
it."""

ISA_NAMES = {
    "portable": "portable",
    "avx2": "AVX2",
    "avx512": "AVX-512",
    "avx512_vnni": "AVX512-VNNI",
    "avx512_bf16": "AVX512-BF16",
    "amx": "AMX",
}
"""The same in words."""


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
    """Return the best variant of the kernels for this CPU, a key of ``ISA_EXTENSIONS``."""
    return available_isas()[-1]


def available_isas() -> tuple[str, ...]:
    """Return the variants of the kernels that this CPU runs, the best last."""
    flags = set(cpu_isa())
    return tuple(name for name, needed in ISA_EXTENSIONS.items() if flags >= needed)


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
