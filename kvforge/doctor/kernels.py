"""Which of the compiled kernels this CPU runs, and at what rate."""

import os
import platform
import time
from collections.abc import Callable

from kvforge.common.hardware import ISA_NAMES, available_isas, best_isa
from kvforge.doctor.finding import EVERY_COMMAND, Check, installed_version

SIZE = 1024
"""Rows, depth and outputs of the products that are timed."""

_NAMES = {**ISA_NAMES, "amx_software": "AMX's on software tiles, for tests"}


def cpu_check() -> Check:
    """The machine, the kernels that it runs, and, once they are compiled, their rate beside torch's."""
    variable, isa = next(
        ((name, value) for name in ("KVFORGE_CPU_ISA", "KVFORGE_BUILD_ISA") if (value := os.environ.get(name))),
        ("", best_isa()),
    )
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    if isa not in _NAMES:
        advice = f"choose from {', '.join(_NAMES)}"
        return Check("CPU", "missing", f"{machine}, {variable}={isa}", advice, EVERY_COMMAND)
    if variable == "KVFORGE_BUILD_ISA" and isa not in available_isas():  # one that other machines have
        isa = best_isa()
    kernels = f"kernels for {_NAMES[isa]}" + (f" ({variable}; best: {best_isa()})" if variable else "")
    try:
        rates = _rates()
    except RuntimeError as error:
        found = f"{machine}, {kernels}: {str(error).splitlines()[0]}"
        advice = f"unset {variable}" if variable else "delete it, and the next kvforge build compiles it"
        return Check("CPU", "missing", found, advice, EVERY_COMMAND)
    told = "not compiled yet, which the first kvforge build does"
    if rates is not None:
        ours, bf16, float32 = rates
        told = (
            f"products of bfloat16 matrices at {ours:.0f} GFLOP/s just now (torch: {bf16:.0f}, and {float32:.0f} in "
            "float32)"
        )
    return Check("CPU", "ok", f"{machine}; {kernels}, {told}")


def _rates() -> tuple[float, float, float] | None:
    """GFLOP/s of bfloat16 products by our kernels and by torch, and of torch's in float32, which is what a CPU without
    instructions for bfloat16 could do; None without torch or a compiled library."""
    if installed_version("torch") is None:
        return None
    import torch

    from plugins.build import find_library
    from plugins.library import load_library
    from plugins.packed_linear import pack, packed_linear

    library = find_library()
    if library is None:
        return None
    load_library(library)
    x, weight = (torch.ones(SIZE, SIZE, dtype=torch.bfloat16) for _ in range(2))
    packed, _ = pack(weight, torch.bfloat16)
    wide_x, wide_weight = x.float(), weight.float()
    products = (lambda: packed_linear(x, packed, SIZE), lambda: x @ weight, lambda: wide_x @ wide_weight)
    ours, bf16, float32 = map(_rate, products)
    return ours, bf16, float32


def _rate(product: Callable[[], object]) -> float:
    """The best of several, some milliseconds each."""
    product()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        product()
        times.append(time.perf_counter() - start)
    return 2 * SIZE**3 / min(times) / 1e9
