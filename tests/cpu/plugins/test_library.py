"""Compiling, caching and loading the operator library."""

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import plugins
from kvforge.common.hardware import ISA_EXTENSIONS, available_isas
from plugins import build, units
from plugins.errors import PluginBuildError, PluginLoadError
from plugins.object_cache import object_path
from plugins.registry import roots
from tests.support.models.kept_answers import kept_answer
from tests.support.other_isas import refused

ROOT = Path(plugins.__file__).parent.parent
X86 = len(units.all_isas()) > 1
HERE = units.isas_of_this_machine(build.find_compiler())


def test_kernels_are_compiled_for_and_chosen_by_the_same_extensions():
    """Compilers write the names that the kernel of Linux gives them without underscores."""
    needed = {name.replace("_", "") for name in ISA_EXTENSIONS["avx512_bf16"] if name.startswith("avx512")}
    source = units.path_of("native/isa.cpp").read_text()
    assert set(re.findall(r'__builtin_cpu_supports\("(avx512\w+)"\)', source)) == needed
    flags = {
        flag for unit in units.units(units.all_isas("x86_64")) for flag in unit.flags if flag.startswith("-mavx512")
    }
    assert flags == {f"-m{name}" for name in needed}


def test_kernels_are_compiled_for_the_instruction_sets_that_this_cpu_runs(monkeypatch):
    monkeypatch.delenv(units.BEST_ISA, raising=False)
    found = units.isas_of_this_machine(build.find_compiler())
    assert tuple(isa for isa in found if isa != "amx_software") == available_isas()
    assert ("amx_software" in found) == ("avx512_bf16" in found)


@pytest.mark.skipif(not X86, reason="one instruction set only")
def test_the_best_instruction_set_can_be_named(monkeypatch):
    monkeypatch.setenv(units.BEST_ISA, "avx512")
    assert units.isas_of_this_machine("no compiler is asked") == ("portable", "avx2", "avx512")
    monkeypatch.setenv(units.BEST_ISA, "avx1024")
    with pytest.raises(PluginBuildError, match=r"^KVFORGE_BUILD_ISA must be one of portable, avx2, .*, not 'avx1024'"):
        build.build_library()


@pytest.mark.skipif(not X86, reason="one instruction set only")
def test_a_compiler_that_does_not_know_this_cpu_is_named(monkeypatch):
    monkeypatch.delenv(units.BEST_ISA, raising=False)
    with pytest.raises(
        PluginBuildError, match=r"^/bin/false does not say what this CPU has .*; set KVFORGE_BUILD_ISA to"
    ):
        units.isas_of_this_machine("/bin/false")


def test_no_nm(small_library, monkeypatch):
    answers = build._run
    monkeypatch.setattr(
        build, "_run", lambda command: "no-nm\n" if command[1] == "-print-prog-name=nm" else answers(command)
    )
    with pytest.raises(PluginBuildError, match=r"^The operators cannot be linked: nm is not on PATH; install binutils"):
        build.build_library()


CALLER = """
namespace mine { namespace isa_avx512 { void run(); struct Sum { void add() const; }; } void other(); }
void call(mine::isa_avx512::Sum& sum) { mine::isa_avx512::run(); sum.add(); mine::other(); }
"""


@pytest.mark.skipif(not X86, reason="one instruction set only")
def test_kernels_that_are_absent_may_be_in_any_namespace(tmp_path):
    compiler, source = build.find_compiler(), tmp_path / "caller.cpp"
    source.write_text(CALLER)
    subprocess.run([compiler, "-c", str(source), "-o", str(tmp_path / "caller.o")], check=True)
    labels = re.findall(r"(?m)^(\w+):$", build._absent(compiler, [tmp_path / "caller.o"]))
    assert labels == ["_ZN4mine10isa_avx5123runEv", "_ZNK4mine10isa_avx5123Sum3addEv"]


PORTABLE_ALONE = """
import os, torch, plugins
from plugins import build
plugins.load_library(build.build_library(isas=("portable",)))
from plugins.packed_linear import pack, packed_linear
x = torch.randn(3, 64, dtype=torch.bfloat16)
packed, _ = pack(torch.randn(48, 64, dtype=torch.bfloat16), torch.bfloat16)
chosen = packed_linear(x, packed, 48)
os.environ["KVFORGE_CPU_ISA"] = "portable"
assert torch.equal(chosen, packed_linear(x, packed, 48))
print(plugins.has_kernels_for("portable"), plugins.has_kernels_for("avx2"), flush=True)
os.environ["KVFORGE_CPU_ISA"] = "avx2"
packed_linear(x, packed, 48)
"""


@pytest.mark.skipif("avx2" not in HERE, reason="one instruction set only")
def test_a_library_with_fewer_instruction_sets_uses_those_that_it_has(library):
    environment = {name: value for name, value in os.environ.items() if name != "KVFORGE_CPU_ISA"}
    command = [sys.executable, "-c", PORTABLE_ALONE]
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert "asks for kernels that this library lacks; it has those for portable" in result.stderr, result.stderr
    assert result.stdout == "True False\n"


@pytest.fixture(scope="module")
def other_isas() -> dict[str, str]:
    return kept_answer("tests.support.other_isas", HERE, refused)


def test_kernels_for_other_instruction_sets_can_be_compiled(other_isas):
    assert not {unit: said for unit, said in other_isas.items() if said}
    missing = set(units.units(units.all_isas())) - set(units.units(HERE))
    assert len(other_isas) == sum(unit.is_variant for unit in missing)


def check_that_others_link_nothing_of(objects: dict[units.Unit, Path]) -> None:
    """A weak symbol compiled with AVX-512 could replace the same function of a portable file."""
    for unit, file in objects.items():
        symbols = subprocess.run(["nm", "-C", str(file)], capture_output=True, text=True, check=True).stdout
        defined = [line.split(maxsplit=2)[1:] for line in symbols.splitlines() if line[:1] != " "]
        external = [name for kind, name in defined if kind.isupper()]
        assert external and all(name.startswith("kvforge::isa_") for name in external), (unit, external)


@pytest.mark.skipif(not X86, reason="one instruction set only")
def test_files_for_one_instruction_set_export_nothing_that_others_could_link(library):
    version = build._compiler()[1]

    def kept(unit: units.Unit) -> Path:
        flags = [*build.flags_with(()), *unit.flags]
        return object_path(build.cache_dir(), units.path_of(unit.source), roots(), flags, version)

    objects = {unit: kept(unit) for unit in units.units(HERE) if unit.is_variant}
    if not all(file.is_file() for file in objects.values()):
        pytest.skip("the library is kept longer than its objects, which were not used for a month")
    assert len(objects) > 20
    check_that_others_link_nothing_of(objects)


@pytest.fixture
def small_library(monkeypatch, tmp_path) -> Path:
    """An empty cache and a library of one file, which compiles in no time."""
    marker = [unit for unit in units.units([]) if unit.source == "native/marker.cpp"]
    monkeypatch.setattr(build, "units", lambda isas: tuple(marker))
    monkeypatch.setenv("KVFORGE_CACHE", str(tmp_path / "a cache"))
    return tmp_path / "a cache"


def test_the_cache_is_used_and_a_damaged_file_is_built_anew(small_library):
    path = build.build_library()
    assert path.parent == small_library
    whole, first = hashlib.sha256(path.read_bytes()), path.stat()
    assert build.build_library() == path and path.stat() == first
    for damage in (b"", whole.digest(), path.read_bytes()[:-1]):
        path.write_bytes(damage)
        assert build.build_library() == path
        assert plugins.library._marked(path).sources == units.sources_version()
        assert path.read_bytes() != damage
    path.unlink()
    assert build.build_library().is_file()
    assert not list(small_library.glob("build-*"))


def test_the_library_is_copied_whole(small_library, tmp_path):
    out = tmp_path / "engine" / "operators.so"
    assert build.build_library(out) == out
    assert out.read_bytes() == build.build_library().read_bytes()
    assert [path.name for path in out.parent.iterdir()] == ["operators.so"]


def test_no_compiler(small_library, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(PluginBuildError, match=r"^No C\+\+ compiler: 'g\+\+' is not on PATH; install g\+\+ "):
        build.build_library()
    assert not small_library.exists()


def test_a_failing_compiler_leaves_nothing(small_library, monkeypatch, tmp_path):
    broken = tmp_path / "broken.cpp"
    broken.write_text("this is no C++\n")
    monkeypatch.setattr(build, "path_of", lambda source: broken)
    with pytest.raises(PluginBuildError, match=r"^Compiling the operator kernels failed \(.*broken\.cpp"):
        build.build_library()
    assert [path.suffix for path in small_library.rglob("*") if path.is_file()] == [".lock"]


def test_an_unwritable_cache(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVFORGE_CACHE", str(tmp_path / "file"))
    with pytest.raises(
        PluginBuildError, match=r"^The cache of .* cannot be written .* set KVFORGE_CACHE to a writable"
    ):
        build.build_library()
    monkeypatch.delenv("KVFORGE_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    with pytest.raises(PluginBuildError, match=r"^The cache of .*file/\.cache/kvforge, cannot be written"):
        build.build_library()


def test_a_whole_library_in_a_read_only_cache_is_used(small_library, monkeypatch, tmp_path):
    path = build.build_library()
    path.with_suffix(".lock").unlink()
    path.with_suffix(".lock").mkdir()  # what cannot be opened to write, for root neither
    assert build.build_library(tmp_path / "operators.so").read_bytes() == path.read_bytes()


BUILD_AND_RUN = """
import time, torch, plugins
path = plugins.load_library()
pool = torch.ones(1, 16, 1, 64)
ints = lambda *x: torch.tensor(x, dtype=torch.int32)
out = plugins.paged_attention(torch.ones(1, 2, 64), pool, pool, ints(0, 1), ints(3), ints([0]), 1.0)
assert torch.equal(out, torch.ones(1, 2, 64))
print(path, path.stat().st_mtime_ns)
"""


COMPILER = """#!/bin/sh
# g++ that keeps its objects.
g++ "$@" || exit
for word do
    case $previous$word in
    -o*.o) cp "$word" "$KEPT" ;;
    -o*.so) echo "$word" >> "$KEPT/linked" ;;
    esac
    previous=$word
done
"""


BUILD_SMALL = """
import os, pathlib, time
from plugins import build, units
marker = tuple(unit for unit in units.units([]) if unit.source == "native/marker.cpp")
build.units = lambda isas: marker
here = pathlib.Path(os.environ["KEPT"])
(here / f"{os.getpid()}.ready").touch()
while len(list(here.glob("*.ready"))) < 2:
    time.sleep(0.001)
path = build.build_library()
print(path, path.stat().st_mtime_ns)
"""


def run_two(program: str, folder: Path) -> list[subprocess.CompletedProcess[str]]:
    """Two processes at once, with an empty cache and a compiler that keeps what it made."""
    compiler, kept, cache = folder / "compiler", folder / "kept", folder / "cache"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    kept.mkdir()
    own = {"KVFORGE_CACHE": str(cache), "CXX": str(compiler), "KEPT": str(kept), "PYTHONPATH": str(ROOT)}
    own[units.BEST_ISA] = units.all_isas()[-1]
    command = [sys.executable, "-c", program]
    processes = [
        subprocess.Popen(command, env=os.environ | own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    told = [process.communicate() for process in processes]
    codes = [process.returncode for process in processes]
    return [subprocess.CompletedProcess(command, code, *each) for code, each in zip(codes, told, strict=True)]


def check_compiled_once(folder: Path, first: subprocess.CompletedProcess, second: subprocess.CompletedProcess) -> None:
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert first.stdout == second.stdout and first.stdout.startswith(str(folder / "cache"))
    assert len(list((folder / "cache").glob("*.so"))) == 1
    assert len((folder / "kept" / "linked").read_text().splitlines()) == 1


def test_two_processes_compile_a_small_library_once(tmp_path):
    check_compiled_once(tmp_path, *run_two(BUILD_SMALL, tmp_path))


@pytest.fixture(scope="module")
def compiled_by_two(tmp_path_factory, full) -> tuple[Path, list[subprocess.CompletedProcess[str]]]:
    """Two processes that load the library at once, with an empty cache: the folder with what was compiled, what they
    printed."""
    if not full:
        pytest.skip("compiles all kernels once more; --full")
    folder = tmp_path_factory.mktemp("compiled")
    return folder, run_two(BUILD_AND_RUN, folder)


def test_two_processes_compile_once(compiled_by_two):
    folder, (first, second) = compiled_by_two
    check_compiled_once(folder, first, second)


def test_loading_is_idempotent(library, tmp_path):
    copy = build.build_library(tmp_path / "operators.so")
    assert plugins.load_library() == library
    assert plugins.load_library(copy) == library
    assert plugins.load_library(str(copy)) == library


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("not a library", "is not an operator library of kvforge; rebuild the engine"),
        (f"kvforge-operators sources=00ff torch={torch.__version__};", "Another version .* use a process for each"),
        ("kvforge-operators sources=00ff torch=1.0;", "was built for torch 1.0 and this is torch"),
    ],
)
def test_a_foreign_library_is_refused(content, message, tmp_path):
    path = tmp_path / "operators.so"
    if content is not None:
        path.write_text(content)
    with pytest.raises(PluginLoadError, match=message) as error:
        plugins.load_library(path)
    assert str(path) in str(error.value)


def test_a_library_of_another_machine_is_refused(monkeypatch, tmp_path):
    path = tmp_path / "operators.so"
    path.write_text(units.marker(HERE))
    monkeypatch.setattr(plugins.library, "_loaded", None)
    with pytest.raises(PluginLoadError, match="does not load on this machine"):
        plugins.load_library(path)


def test_other_machines_get_the_portable_kernels_only():
    portable = units.units(units.all_isas("aarch64"))
    assert not any(flag.startswith("-m") for unit in portable for flag in unit.flags)
    assert {unit.source for unit in units.units(units.all_isas("x86_64"))} - {unit.source for unit in portable} == {
        "packed_linear/cpu_bf16.cpp",
        "packed_linear/cpu_finish_avx512.cpp",
        "packed_linear/cpu_int4_tiles.cpp",
        "packed_linear/cpu_int8_vnni.cpp",
        "packed_linear/cpu_tiles.cpp",
        "paged_attention/cpu_bf16.cpp",
        "paged_attention/cpu_bf16_direct.cpp",
        "paged_attention/cpu_bf16_tile.cpp",
        "paged_attention/cpu_tiles.cpp",
        "paged_attention/cpu_tiles_direct.cpp",
        "paged_attention/cpu_vnni.cpp",
    }


@pytest.mark.skipif(not X86, reason="one instruction set only")
def test_files_for_any_instruction_set_export_nothing_that_others_could_link(compiled_by_two):
    made = compiled_by_two[0] / "kept"
    check_that_others_link_nothing_of(
        {unit: made / unit.object_name for unit in units.units(units.all_isas()) if unit.is_variant}
    )


def test_the_table_names_what_exists():
    for name, operator in plugins.OPERATORS.items():
        assert name == operator.name and operator.backends[0] == "reference"
        schema = getattr(torch.ops.kvforge, name).default._schema
        assert str(schema) == str(torch._C.parse_schema(operator.qualified_name + operator.schema))
        sources = {f"{name}/{path.name}" for path in operator.folder.glob("*.cpp")} - {f"{name}/{units.REGISTER}"}
        assert sources and {unit.source for unit in units.units(units.all_isas("x86_64"))} >= sources
        assert operator.variants.keys() <= {path.name for path in operator.folder.iterdir()}
        assert f'#include "{name}/register.cpp"' in units.registrations()


NO_COMPILER = """#!/bin/sh
# Writes each call and makes what is asked for, but for headers where they cannot be.
case "$*" in *-march=native*) g++ "$@"; exit ;; *-print-prog-name=nm) echo true; exit ;; esac
echo "$@" >> "$CALLS"
case "$*" in *c++-header*) [ -z "$NO_HEADERS" ] || exit 1 ;; esac
while [ $# -gt 0 ]; do [ "$1" = -o ] && echo made > "$2"; shift; done
"""


@pytest.mark.parametrize("no_headers", ["", "1"])
def test_files_that_know_tensors_share_a_compiled_header(no_headers: str, monkeypatch, tmp_path):
    compiler, calls = tmp_path / "compiler", tmp_path / "calls"
    compiler.write_text(NO_COMPILER)
    compiler.chmod(0o755)
    for name, value in {"CXX": compiler, "CALLS": calls, "NO_HEADERS": no_headers, "KVFORGE_CACHE": tmp_path}.items():
        monkeypatch.setenv(name, str(value))
    build.build_library()
    said = [line.split() for line in calls.read_text().splitlines()[1:]]
    compiled = {words[words.index("-c") + 1]: words for words in said if "-c" in words}
    including = {
        str(units.path_of(unit.source))
        for unit in units.units(HERE)
        if unit.source != units.REGISTER and "<ATen/core/Tensor.h>" in units.path_of(unit.source).read_text()
    }
    assert len(including) > 15 and len(compiled) == len({unit.source for unit in units.units(HERE)})
    assert {source for source, words in compiled.items() if "-include" in words} == (set() if no_headers else including)
    (header,) = [words[words.index("-o") + 1] for words in said if "c++-header" in words]
    assert all(f"{words[words.index('-include') + 1]}.gch" == header for words in said if "-include" in words)
    assert not Path(header).exists(), "it takes 137 MB"

    calls.unlink()
    for library in tmp_path.glob("operators-*"):
        library.unlink()
    monkeypatch.setattr(build, "path_of", changed_copies(including, 4, tmp_path))
    build.build_library()
    again = calls.read_text().splitlines()[1:]
    assert len(again) == 4 + 1 and "c++-header" not in str(again), "four files and the library take less without it"


def changed_copies(sources: set[str], number: int, folder: Path) -> Callable[[str], Path]:
    """Where sources are, of which so many of ``sources`` have changed."""
    changed = {}
    for index, source in enumerate(sorted(sources)[:number]):
        changed[source] = folder / f"changed-{index}.cpp"
        changed[source].write_text(Path(source).read_text() + "// changed\n")
    before = build.path_of
    return lambda source: changed.get(str(before(source)), before(source))
