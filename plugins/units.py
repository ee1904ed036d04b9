"""What the library of operators is made of: one object file per source, or one per source and instruction set."""

import hashlib
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from plugins.errors import PluginBuildError
from plugins.operator import ISAS, TILE_ISAS
from plugins.registry import OPERATORS, roots

_AVX2 = ("-mavx2", "-mfma")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")
_AVX512_VNNI = (*_AVX512, "-mavx512vnni")
_AVX512_BF16 = (*_AVX512_VNNI, "-mavx512bf16", "-mavx512vbmi")
# Kernels are compiled once for each of these, and native/isa.cpp picks one at run time.
_ISA_FLAGS = {
    "portable": (),
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512_vnni": _AVX512_VNNI,
    "avx512_bf16": _AVX512_BF16,
    "amx_software": (*_AVX512_BF16, "-DKVFORGE_SOFTWARE_TILES"),
    "amx": _AVX512_BF16,  # tiles are written in assembler
}
_AMX_MACROS = ("__AMX_TILE__", "__AMX_BF16__", "__AMX_INT8__")
BEST_ISA = "KVFORGE_BUILD_ISA"
"""The environment variable that names the best instruction set to compile for, in place of this CPU's."""

REGISTER = "register.cpp"
"""The file of an operator that hands its kernel to the dispatcher. These files are compiled as one, because
`torch/library.h` takes longer to compile than the rest of them."""


@dataclass(frozen=True)
class Unit:
    """One object file: a source below one of the operators' roots and the flags only it gets."""

    source: str
    flags: tuple[str, ...] = ()

    @property
    def object_name(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()[:12] + ".o"

    @property
    def is_variant(self) -> bool:
        """Whether it is for one instruction set, others of which have objects of their own from the same source."""
        return any(flag.startswith("-DKVFORGE_ISA=") for flag in self.flags)


def all_isas(machine: str | None = None) -> tuple[str, ...]:
    """Return the instruction sets that there are kernels for on a machine type (default: this one)."""
    machine = platform.machine() if machine is None else machine
    return (*ISAS, *TILE_ISAS) if machine in ("x86_64", "AMD64") else ISAS[:1]


def isas_of_this_machine(compiler: str) -> tuple[str, ...]:
    """Return the instruction sets that operators are compiled for here: those of this CPU, as ``compiler`` knows it, or
    all up to the one that ``$KVFORGE_BUILD_ISA`` names.

    Raises PluginBuildError where the variable names none, or the compiler does not know this CPU.
    """
    every, best = all_isas(), os.environ.get(BEST_ISA)
    if best:
        if best not in every:
            raise PluginBuildError(f"{BEST_ISA} must be one of {', '.join(every)}, not {best!r}.")
        return every[: every.index(best) + 1]
    if len(every) == 1:
        return every
    command = [compiler, "-march=native", "-dM", "-E", "-x", "c++", os.devnull]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise PluginBuildError(
            f"{compiler} does not say what this CPU has (-march=native); set {BEST_ISA} to one of {', '.join(every)}."
        )
    macros = {line.split()[1] for line in result.stdout.splitlines() if line.startswith("#define ")}
    return tuple(isa for isa in every if macros.issuperset(_macros(isa)))


def _macros(isa: str) -> list[str]:
    """What a compiler defines where it compiles for an instruction set."""
    flags = [flag for flag in _ISA_FLAGS[isa] if flag.startswith("-m") and "=" not in flag]
    return [f"__{flag.removeprefix('-m').upper()}__" for flag in flags] + list(_AMX_MACROS if isa == "amx" else ())


def units(isas: Sequence[str]) -> tuple[Unit, ...]:
    """Return the object files of the library for these instruction sets."""
    plain = [
        Unit("native/isa.cpp", (f'-DKVFORGE_COMPILED_ISAS="{",".join(isas)}"',)),
        Unit("native/marker.cpp", (f'-DKVFORGE_MARKER="{marker(isas)}"',)),
    ]
    variants = []
    for name, operator in OPERATORS.items():
        for file in sorted(operator.folder.glob("*.cpp")):
            source, several = f"{name}/{file.name}", operator.variants.get(file.name)
            if several is not None:
                variants += [_variant(source, isa, *several.flags) for isa in several.isas if isa in isas]
            elif file.name != REGISTER:
                plain.append(Unit(source))
    return (Unit(REGISTER), *variants, *plain)  # the longest first, and those last that wait for the header of tensors


def _variant(source: str, isa: str, *flags: str) -> Unit:
    return Unit(source, (*_ISA_FLAGS[isa], f"-DKVFORGE_ISA=isa_{isa}", *flags))


def registrations() -> str:
    """Return the text of the one file that registers all kernels."""
    names = [name for name, operator in OPERATORS.items() if (operator.folder / REGISTER).is_file()]
    return "".join(f'#include "{name}/{REGISTER}"\n' for name in names)


def path_of(source: str) -> Path:
    """Return the file of a unit's source."""
    return next((path for root in roots() if (path := root / source).is_file()), roots()[0] / source)


def sources_version() -> str:
    """Hash of the C++ sources, as 16 hex digits: what `load_library` compares."""
    digest = hashlib.sha256()
    for root in roots():
        for path in sorted([*root.rglob("*.cpp"), *root.rglob("*.h")]):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def marker(isas: Sequence[str]) -> str:
    """The text inside the library by which a file is recognised without loading it."""
    return f"kvforge-operators sources={sources_version()} torch={torch.__version__}; isas={','.join(isas)};"
