"""Compiles kernels for instruction sets that this machine's library leaves out, as far as to know that they can be."""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from plugins import build, units
from plugins.registry import roots


def refused() -> dict[str, str]:
    """Return what the compiler says against each file and instruction set, nothing where it would compile it."""
    compiler = build.find_compiler()
    here = units.units(units.isas_of_this_machine(compiler))
    others = [unit for unit in units.units(units.all_isas()) if unit.is_variant and unit not in here]
    flags = [flag for flag in build.flags_with(()) if flag != "-O3"]
    folders = [f"-I{root}" for root in roots()] + [f"-isystem{Path(torch.__file__).parent / 'include'}"]

    def said(unit: units.Unit) -> str:
        command = [compiler, *flags, "-fsyntax-only", *unit.flags, *folders, str(units.path_of(unit.source))]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        return result.stderr if result.returncode else ""

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        names = (" ".join((unit.source, *unit.flags)) for unit in others)
        return dict(zip(names, pool.map(said, others), strict=True))
