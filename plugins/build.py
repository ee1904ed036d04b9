"""Compiles the C++ kernels of all operators into one shared library with plain g++ calls.

The library is cached in $KVFORGE_CACHE (default ~/.cache/kvforge) under a key of everything that decides
its contents, and its object files beside it, of which the next library takes what did not change. Compilation is
locked between processes, and a file appears there whole or not at all.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from plugins.errors import PluginBuildError
from plugins.object_cache import forget_old, mark_used, object_path
from plugins.operator import ISAS, TILE_ISAS
from plugins.registry import OPERATORS, roots

_FLAGS = (
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-fopenmp",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
)
SANITIZE = (  # the memory checkers of g++; their library has to be loaded before everything else
    "-O1",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
    "-fno-omit-frame-pointer",
)
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
REGISTER = "register.cpp"
"""The file of an operator that hands its kernel to the dispatcher. These files are compiled as one, because
`torch/library.h` takes longer to compile than the rest of them."""

_TENSOR_HEADER = "ATen/core/Tensor.h"
"""What most of the files that know tensors take longest for."""
_MANY = 5
"""Files that take longer than the header before them and then themselves."""


@dataclass(frozen=True)
class Unit:
    """One object file: a source below one of the operators' roots, the flags only it gets, and the instruction set that
    it is for, none where all machines run it."""

    source: str
    flags: tuple[str, ...] = ()
    isa: str | None = None

    @property
    def object_name(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()[:12] + ".o"


def units(machine: str | None = None) -> tuple[Unit, ...]:
    """The object files of the library for a machine type (default: this one)."""
    machine = platform.machine() if machine is None else machine
    isas = (*ISAS, *TILE_ISAS) if machine in ("x86_64", "AMD64") else ISAS[:1]
    plain = [Unit("native/isa.cpp"), Unit("native/marker.cpp", (f'-DKVFORGE_MARKER="{marker()}"',))]
    variants = []
    for name, operator in OPERATORS.items():
        for file in sorted(operator.folder.glob("*.cpp")):
            source, several = f"{name}/{file.name}", operator.variants.get(file.name)
            if several is not None:
                variants += [_variant(source, isa, *several.flags) for isa in several.isas if isa in isas]
            elif file.name != REGISTER:
                plain.append(Unit(source))
    return (Unit(REGISTER), *variants, *plain)  # the longest first, and those last that wait for the header of tensors


def _registrations() -> str:
    """The text of the one file that registers all kernels."""
    names = [name for name, operator in OPERATORS.items() if (operator.folder / REGISTER).is_file()]
    return "".join(f'#include "{name}/{REGISTER}"\n' for name in names)


def path_of(source: str) -> Path:
    """The file of a unit's source."""
    return next((path for root in roots() if (path := root / source).is_file()), roots()[0] / source)


def _variant(source: str, isa: str, *flags: str) -> Unit:
    return Unit(source, (*_ISA_FLAGS[isa], f"-DKVFORGE_ISA=isa_{isa}", *flags), isa)


def sources_version() -> str:
    """Hash of the C++ sources, as 16 hex digits: what `load_library` compares."""
    digest = hashlib.sha256()
    for root in roots():
        for path in sorted([*root.rglob("*.cpp"), *root.rglob("*.h")]):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def marker() -> str:
    """The text inside the library by which a file is recognised without loading it."""
    return f"kvforge-operators sources={sources_version()} torch={torch.__version__};"


def cache_dir() -> Path:
    given = os.environ.get("KVFORGE_CACHE")
    try:
        return Path(given) if given else Path.home() / ".cache" / "kvforge"
    except RuntimeError:
        raise PluginBuildError(
            "There is no home directory for the cache of compiled operators; set KVFORGE_CACHE to a writable directory."
        ) from None


def build_library(
    out: Path | None = None, extra_flags: tuple[str, ...] = (), extra_isas: Collection[str] = tuple(_ISA_FLAGS)
) -> Path:
    """Compiles the kernels, or finds them compiled, and returns the library's path.

    With `out`, the library is also copied there (replacing the file at once) and `out` is returned. A
    damaged file in the cache is built anew. `extra_flags` (SANITIZE) go to every call of the compiler, but for kernels
    of other instruction sets than `extra_isas`.
    Raises PluginBuildError without a compiler, when the compiler fails, or when the cache cannot be written.
    """
    compiler, version = _compiler()
    target = _path_of(version, (*extra_flags, *(extra_isas if extra_flags else ())))
    try:
        if not _is_whole(target):  # a whole one is used where it lies, in a cache that may be read-only
            target.parent.mkdir(parents=True, exist_ok=True)
            with open(target.with_suffix(".lock"), "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not _is_whole(target):
                    _compile(compiler, version, target, extra_flags, extra_isas)
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
        target = _path_of(_compiler()[1], ())
    except PluginBuildError:
        return None
    return target if _is_whole(target) else None


def _path_of(compiler_version: str, extra_flags: tuple[str, ...]) -> Path:
    return cache_dir() / f"operators-{_key(compiler_version, extra_flags)}.so"


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


def _key(compiler_version: str, extra_flags: tuple[str, ...]) -> str:
    parts = (compiler_version, torch.__version__, repr(_FLAGS + extra_flags), repr(units()), sources_version())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _digest_path(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _is_whole(library: Path) -> bool:
    digest = _digest_path(library)
    if not (library.is_file() and digest.is_file()):
        return False
    return hashlib.sha256(library.read_bytes()).hexdigest() == digest.read_text()


def _compile(
    compiler: str, version: str, target: Path, extra_flags: tuple[str, ...], extra_isas: Collection[str]
) -> None:
    torch_root = Path(torch.__file__).parent
    include = torch_root / "include"
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    plain, flags = [*_FLAGS, abi], [*_FLAGS, *extra_flags, abi]
    includes = [
        *(f"-I{root}" for root in roots()),
        f"-isystem{include}",
        f"-isystem{include / 'torch' / 'csrc' / 'api' / 'include'}",
    ]
    (target.parent / "objects").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as scratch:
        registrations = Path(scratch) / REGISTER
        registrations.write_text(_registrations())
        objects, missing = {}, []
        for unit in units():
            source = registrations if unit.source == REGISTER else path_of(unit.source)
            own = [*(flags if unit.isa is None or unit.isa in extra_isas else plain), *unit.flags]
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
        library = Path(scratch) / target.name
        libraries = [f"-L{torch_root / 'lib'}", "-lc10", "-ltorch_cpu"]
        linked = [*map(str, objects.values()), *libraries]
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


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        lines = result.stderr.strip().splitlines() or ["no message"]
        first = next((line for line in lines if "error" in line), lines[-1])
        raise PluginBuildError(f"Compiling the operator kernels failed ({first}); g++ 11 or newer is needed.")


def _copy(library: Path, out: Path) -> Path:
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=out.parent, delete=False) as temporary:
        temporary.write(library.read_bytes())
    os.chmod(temporary.name, 0o755)
    os.replace(temporary.name, out)
    return out
