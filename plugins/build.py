"""Compiles the C++ kernels of all operators into one shared library with plain g++ calls.

The library is cached in $KVFORGE_CACHE (default ~/.cache/kvforge) under a key of everything that decides
its contents, and its object files beside it, of which the next library takes what did not change. Compilation is
locked between processes, and a file appears there whole or not at all.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from plugins.errors import PluginBuildError
from plugins.object_cache import forget_old, mark_used, object_path
from plugins.registry import roots
from plugins.units import REGISTER, Unit, all_isas, isas_of_this_machine, path_of, registrations, sources_version, units

FLAGS = (
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-fopenmp",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
)
SANITIZE = (  # the memory checkers of g++; their library has to be loaded before everything else
    "-O0",  # finds what -O1 does, and compiles in half the time
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
    "-fno-omit-frame-pointer",
)
_VARIANT = re.compile("_Z.*?(" + "|".join(f"{4 + len(isa)}isa_{isa}" for isa in all_isas()) + ")")
"""The mangled names of what is in namespaces KVFORGE_ISA, wherever these are."""
_TENSOR_HEADER = "ATen/core/Tensor.h"
"""What most of the files that know tensors take longest for."""
_MANY = 5
"""Files that take longer than the header before them and then themselves."""


def cache_dir() -> Path:
    given = os.environ.get("KVFORGE_CACHE")
    try:
        return Path(given) if given else Path.home() / ".cache" / "kvforge"
    except RuntimeError:
        raise PluginBuildError(
            "There is no home directory for the cache of compiled operators; set KVFORGE_CACHE to a writable directory."
        ) from None


def build_library(
    out: Path | None = None, extra_flags: tuple[str, ...] = (), isas: Sequence[str] | None = None
) -> Path:
    """Compiles the kernels, or finds them compiled, and returns the library's path.

    With `out`, the library is also copied there (replacing the file at once) and `out` is returned. A
    damaged file in the cache is built anew. `extra_flags` (SANITIZE) go to every call of the compiler. Kernels are
    compiled for `isas`, by default those of this machine.
    Raises PluginBuildError without a compiler, when the compiler fails, or when the cache cannot be written.
    """
    compiler, version = _compiler()
    parts = units(isas_of_this_machine(compiler) if isas is None else isas)
    target = _path_of(version, parts, extra_flags)
    try:
        if not _is_whole(target):  # a whole one is used where it lies, in a cache that may be read-only
            target.parent.mkdir(parents=True, exist_ok=True)
            with open(target.with_suffix(".lock"), "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not _is_whole(target):
                    _compile(compiler, version, parts, target, extra_flags)
    except OSError as error:
        raise PluginBuildError(
            f"The cache of compiled operators, {target.parent}, cannot be written ({error.strerror}); set "
            "KVFORGE_CACHE to a writable directory."
        ) from error
    try:
        return target if out is None else _copy(target, out)
    except OSError as error:
        raise PluginBuildError(f"The operator library cannot be copied to {out} ({error.strerror}).") from error


def find_library() -> Path | None:
    """The compiled library in the cache, if it is there and there is a compiler to name it by."""
    try:
        compiler, version = _compiler()
        target = _path_of(version, units(isas_of_this_machine(compiler)), ())
    except PluginBuildError:
        return None
    return target if _is_whole(target) else None


def _path_of(compiler_version: str, parts: tuple[Unit, ...], extra_flags: tuple[str, ...]) -> Path:
    contents = (compiler_version, torch.__version__, repr(FLAGS + extra_flags), repr(parts), sources_version())
    key = hashlib.sha256("\0".join(contents).encode()).hexdigest()[:24]
    return cache_dir() / f"operators-{key}.so"


def find_compiler() -> str:
    """Return where the C++ compiler is, ``$CXX`` if set, else ``g++``; raises PluginBuildError where there is none."""
    name = os.environ.get("CXX") or "g++"
    path = shutil.which(name)
    if path is None:
        raise PluginBuildError(
            f"No C++ compiler: {name!r} is not on PATH; install g++ (Debian, Ubuntu: apt install g++) or set CXX."
        )
    return path


def _compiler() -> tuple[str, str]:
    path = find_compiler()
    result = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    return path, result.stdout


def _digest_path(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _is_whole(library: Path) -> bool:
    digest = _digest_path(library)
    if not (library.is_file() and digest.is_file()):
        return False
    return hashlib.sha256(library.read_bytes()).hexdigest() == digest.read_text()


def flags_with(extra_flags: tuple[str, ...]) -> list[str]:
    """Return what the compiler is told for every file."""
    return [*FLAGS, *extra_flags, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]


def _compile(compiler: str, version: str, parts: tuple[Unit, ...], target: Path, extra_flags: tuple[str, ...]) -> None:
    torch_root = Path(torch.__file__).parent
    include = torch_root / "include"
    flags = flags_with(extra_flags)
    includes = [
        *(f"-I{root}" for root in roots()),
        f"-isystem{include}",
        f"-isystem{include / 'torch' / 'csrc' / 'api' / 'include'}",
    ]
    (target.parent / "objects").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as scratch:
        together = Path(scratch) / REGISTER
        together.write_text(registrations())
        objects, missing = {}, []
        for unit in parts:
            source = together if unit.source == REGISTER else path_of(unit.source)
            own = [*flags, *unit.flags]
            objects[unit] = object_path(target.parent, source, roots(), own, version)
            if not mark_used(objects[unit]):
                missing.append((unit, source, own))
        tensors = {unit for unit, source, _ in missing if f"<{_TENSOR_HEADER}>" in source.read_text()}
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            command = [compiler, *flags, *includes]
            header = pool.submit(_precompiled, command, Path(scratch)) if len(tensors) >= _MANY else None

            def compile_one(one: tuple[Unit, Path, list[str]]) -> None:
                unit, source, own = one
                first = header.result() if header is not None and unit in tensors else ()
                made = Path(scratch) / unit.object_name
                _run([compiler, *own, *includes, *first, "-c", str(source), "-o", str(made)])
                os.replace(made, objects[unit])

            list(pool.map(compile_one, missing))
        library, absent = Path(scratch) / target.name, Path(scratch) / "absent.s"
        absent.write_text(_absent(compiler, list(objects.values())))
        libraries = [f"-L{torch_root / 'lib'}", "-lc10", "-ltorch_cpu"]
        linked = [*map(str, objects.values()), str(absent), *libraries]
        _run([compiler, "-shared", "-fopenmp", *(extra_flags or ("-s",)), "-o", str(library), *linked])
        digest = Path(scratch) / "digest"
        digest.write_text(hashlib.sha256(library.read_bytes()).hexdigest())
        os.replace(library, target)
        os.replace(digest, _digest_path(target))
    forget_old(target.parent)


def _precompiled(command: list[str], folder: Path) -> tuple[str, ...]:
    """Compile the header of tensors into ``folder``; returns the options that take it in, none without it."""
    header = folder / "tensors.h"
    header.write_text(f"#include <{_TENSOR_HEADER}>\n")
    try:
        _run([*command, "-x", "c++-header", str(header), "-o", f"{header}.gch"])
    except PluginBuildError:
        return ()
    return ("-include", str(header))


def _absent(compiler: str, objects: list[Path]) -> str:
    """Assembler for what `objects` name of kernels that were not compiled, whose instruction sets native/isa.cpp never
    chooses: one invalid instruction in the place of them all."""
    nm = shutil.which(_run([compiler, "-print-prog-name=nm"]).strip())
    if nm is None:
        raise PluginBuildError("The operators cannot be linked: nm is not on PATH; install binutils.")
    defined: set[str] = set()
    named: set[str] = set()
    for line in _run([nm, "-P", "-g", *map(str, objects)]).splitlines():
        if _VARIANT.match(line):
            name, kind = line.split()[:2]
            (named if kind == "U" else defined).add(name)
    if not named - defined:
        return ""
    labels = "".join(f".globl {name}\n.hidden {name}\n{name}:\n" for name in sorted(named - defined))
    return f'{labels}.byte 0x0f, 0x0b\n.section .note.GNU-stack,"",@progbits\n'


def _run(command: list[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        lines = result.stderr.strip().splitlines() or ["no message"]
        first = next((line for line in lines if "error" in line), lines[-1])
        raise PluginBuildError(f"Compiling the operator kernels failed ({first}); g++ 11 or newer is needed.")
    return result.stdout


def _copy(library: Path, out: Path) -> Path:
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=out.parent, delete=False) as temporary:
        temporary.write(library.read_bytes())
    os.chmod(temporary.name, 0o755)
    os.replace(temporary.name, out)
    return out
