"""Packages share the process's C++ runtime: one of their own is refused where it is made, not where it is loaded."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._inductor import config
from torch._inductor.cpp_builder import CppBuilder, CppOptions
from torch.export import ExportedProgram

from kvforge.common.errors import BuildError
from kvforge.compiler.aot_inductor import LINK_OPTION, compile_package, plain_stacks
from kvforge.compiler.cpu_packages import package_writer

WITH_OWN_RUNTIME = """#!/bin/sh
case " $* " in *" -shared "*) exec g++ "$@" -static-libstdc++;; *" -c "*) ;; *) exec g++ "$@";; esac
for word; do test "$last" != -o || object=$word; last=$word; done
g++ -x c++ -fPIC -c -o "$object" - <<'END'
#include <string>
static std::string made(int n) { return std::string(n, 1); }
static auto volatile used = made;
END
"""


@pytest.fixture
def program() -> ExportedProgram:
    return torch.export.export(torch.nn.Linear(7, 5), (torch.randn(3, 7),))


@pytest.fixture
def own_runtime(tmp_path: Path) -> Iterator[None]:
    """A compiler that puts its runtime into libraries, of objects that are made in no time: nobody loads them."""
    compiler = tmp_path / "g++"
    compiler.write_text(WITH_OWN_RUNTIME)
    compiler.chmod(0o755)
    with config.patch({"cpp.cxx": (None, str(compiler)), "cpp_cache_precompile_headers": False}):
        yield


def test_an_engine_for_the_cpu_is_refused(program: ExportedProgram, own_runtime: None, tmp_path: Path) -> None:
    with (
        pytest.raises(BuildError, match=r"/g\+\+ put its runtime library into own, .* set CXX"),
        package_writer() as write,
    ):
        write(program, tmp_path / "own.pt2")


def test_a_package_of_another_target_is_refused(
    program: ExportedProgram, own_runtime: None, full: bool, tmp_path: Path
) -> None:
    if not full:
        pytest.skip("compiles once more; --full")
    with pytest.raises(BuildError, match=r"/g\+\+ put its runtime library into own, .* set CXX"):
        compile_package(program, tmp_path / "own.pt2")


def test_libraries_of_all_targets_ask_for_no_executable_stack() -> None:
    """That those of engines for CPUs do not is seen in test_cpu_packages.py, where one is loaded."""
    library, objects = (CppBuilder("x", "x.cpp", CppOptions(compile_only=one)) for one in (False, True))
    with plain_stacks():
        assert LINK_OPTION in library.get_command_line() and LINK_OPTION not in objects.get_command_line()
    assert LINK_OPTION not in library.get_command_line()
