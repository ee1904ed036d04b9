"""Compiles the C++ kernels of all operators into one shared library with plain g++ calls.

The library is cached in $KVFORGE_CACHE (default ~/.cache/kvforge) under a key of everything that decides
its contents. Compilation is locked between processes, and a file appears there whole or not at all.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from plugins.errors import PluginBuildError

ROOT = Path(__file__).parent
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
# Kernels are compiled once for each of these, and native/isa.cpp picks one at run time.
_ISA_FLAGS = {
    "portable": (),
    "avx2": ("-mavx2", "-mfma"),
    "avx512": (
        "-mavx2",
        "-mfma",
        *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mavx512vnni", "-mavx512vbmi"),
        "-mprefer-vector-width=512",
    ),
}
_BF16 = ("cpu_bf16_tile", "cpu_bf16_direct", "cpu_bf16")
_LINEAR = ("cpu_bf16", "cpu_int8_vnni")


@dataclass(frozen=True)
class Unit:
    """One object file: a source below plugins/ and the flags only it gets."""

    source: str
    flags: tuple[str, ...] = ()

    @property
    def object_name(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()[:12] + ".o"


def units(machine: str | None = None) -> tuple[Unit, ...]:
    """The object files of the library for a machine type (default: this one)."""
    machine = platform.machine() if machine is None else machine
    x86 = machine in ("x86_64", "AMD64")
    isas = tuple(_ISA_FLAGS) if x86 else ("portable",)
    bf16 = tuple(Unit(f"paged_attention/{name}.cpp", _ISA_FLAGS["avx512"]) for name in _BF16 if x86)
    return (  # longest first
        Unit("native/register.cpp"),
        Unit("paged_attention/cpu.cpp"),
        Unit("packed_linear/cpu.cpp"),
        Unit("rope_paged_kv_write/cpu.cpp"),
        Unit("low_rank_key_reconstruct/cpu.cpp"),
        Unit("speculative_verify/cpu.cpp"),
        Unit("landmark_select/cpu.cpp"),
        Unit("chunk_cache_update/cpu.cpp"),
        Unit("selected_kv_write/cpu.cpp"),
        Unit("native/isa.cpp"),
        Unit("native/marker.cpp", (f'-DKVFORGE_MARKER="{marker()}"',)),
        Unit("paged_attention/cpu_plan.cpp"),
        *bf16,
        *(_variant("paged_attention/cpu_generic.cpp", isa) for isa in isas),
        *(_variant("low_rank_key_reconstruct/cpu_kernel.cpp", isa) for isa in isas),
        *(_variant("speculative_verify/cpu_kernel.cpp", isa) for isa in isas),
        *(_variant("landmark_select/cpu_kernel.cpp", isa) for isa in isas),
        *(Unit(f"packed_linear/{name}.cpp", _ISA_FLAGS["avx512"]) for name in _LINEAR if x86),
        *(_variant("packed_linear/cpu_finish.cpp", isa) for isa in isas),
        *(_variant("packed_linear/cpu_bf16_generic.cpp", isa) for isa in isas if isa != "avx512"),
        *(_variant("packed_linear/cpu_int8_generic.cpp", isa) for isa in isas if isa != "avx512"),
        # No contraction: the rotation is then bit for bit the reference's.
        *(_variant("rope_paged_kv_write/cpu_kernel.cpp", isa, "-ffp-contract=off") for isa in isas),
    )


def _variant(source: str, isa: str, *flags: str) -> Unit:
    return Unit(source, (*_ISA_FLAGS[isa], f"-DKVFORGE_ISA=isa_{isa}", *flags))


def sources_version() -> str:
    """Hash of the C++ sources, as 16 hex digits: what `load_library` compares."""
    digest = hashlib.sha256()
    for path in sorted([*ROOT.rglob("*.cpp"), *ROOT.rglob("*.h")]):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def marker() -> str:
    """The text inside the library by which a file is recognised without loading it."""
    return f"kvforge-operators sources={sources_version()} torch={torch.__version__};"


def cache_dir() -> Path:
    return Path(os.environ.get("KVFORGE_CACHE") or Path.home() / ".cache" / "kvforge")


def build_library(out: Path | None = None, extra_flags: tuple[str, ...] = ()) -> Path:
    """Compiles the kernels, or finds them compiled, and returns the library's path.

    With `out`, the library is also copied there (replacing the file at once) and `out` is returned. A
    damaged file in the cache is built anew. `extra_flags` (SANITIZE) go to every call of the compiler.
    Raises PluginBuildError without a compiler, when the compiler fails, or when the cache cannot be written.
    """
    compiler, version = _compiler()
    target = cache_dir() / f"operators-{_key(version, extra_flags)}.so"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_whole(target):
                _compile(compiler, target, extra_flags)
        return target if out is None else _copy(target, out)
    except OSError as error:
        raise PluginBuildError(
            f"The operator library cannot be written to {out or target.parent} ({error.strerror}); set "
            "KVFORGE_CACHE to a writable directory."
        ) from error


def _compiler() -> tuple[str, str]:
    name = os.environ.get("CXX") or "g++"
    path = shutil.which(name)
    if path is None:
        raise PluginBuildError(
            f"No C++ compiler: {name!r} is not on PATH; install g++ (Debian, Ubuntu: apt install g++) or set CXX."
        )
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


def _compile(compiler: str, target: Path, extra_flags: tuple[str, ...]) -> None:
    torch_root = Path(torch.__file__).parent
    include = torch_root / "include"
    flags = [
        *_FLAGS,
        *extra_flags,
        f"-I{ROOT}",
        f"-isystem{include}",
        f"-isystem{include / 'torch' / 'csrc' / 'api' / 'include'}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
    ]
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as scratch:
        all_units = units()
        objects = [str(Path(scratch) / unit.object_name) for unit in all_units]

        def compile_unit(index: int) -> None:
            unit = all_units[index]
            _run([compiler, *flags, *unit.flags, "-c", str(ROOT / unit.source), "-o", objects[index]])

        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            list(pool.map(compile_unit, range(len(all_units))))
        library = Path(scratch) / target.name
        libraries = [f"-L{torch_root / 'lib'}", "-lc10", "-ltorch_cpu"]
        _run([compiler, "-shared", "-fopenmp", *(extra_flags or ("-s",)), "-o", str(library), *objects, *libraries])
        digest = Path(scratch) / "digest"
        digest.write_text(hashlib.sha256(library.read_bytes()).hexdigest())
        os.replace(library, target)
        os.replace(digest, _digest_path(target))


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
