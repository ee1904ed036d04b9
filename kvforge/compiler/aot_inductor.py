"""Compiling an exported graph to a package with AOTInductor, weights left outside."""

import contextlib
import subprocess
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch._inductor.cpp_builder import CppBuilder, get_cpp_compiler
from torch.export import ExportedProgram

from kvforge.common.errors import BuildError, first_line

INDUCTOR_CONFIG = {
    "aot_inductor.package_constants_in_so": False,
    "cpp.dynamic_threads": True,
}

LINK_OPTION = "-Wl,-z,noexecstack"
"""Inductor's assembly asks for an executable stack, with which glibc 2.41 and a hardened service load no library."""

_INDUCTOR = threading.Lock()

SHARED_RUNTIMES = (b"\0libstdc++.so", b"\0libc++.so")
"""Names that a library has among those it needs, if it shares its process's C++ runtime."""


def compiler_version() -> str:
    """Return what the C++ compiler that Inductor calls says of itself."""
    command = [get_cpp_compiler(), "--version"]
    return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False).stdout


def compile_package(program: ExportedProgram, path: Path) -> None:
    """Write the AOTInductor package of ``program`` to ``path`` (``*.pt2``), without its weights.

    Raises:
        BuildError: code generation or the C++ compiler failed, or the compiler put a C++ runtime into the package.
    """
    try:
        with torch.no_grad(), plain_stacks():
            torch._inductor.aoti_compile_and_package(
                program, package_path=str(path), inductor_configs=dict(INDUCTOR_CONFIG)
            )
    except Exception as error:
        raise BuildError(f"AOTInductor could not compile {path.stem}: {first_line(error)}") from error
    check_runtime(path)


@contextlib.contextmanager
def plain_stacks() -> Iterator[None]:
    """Inside, Inductor links libraries that ask for no executable stack. One thread is inside at a time, since Inductor
    and what is changed of it are the process's."""

    def with_option(builder: CppBuilder) -> str:
        line = str(line_of(builder))
        return f"{line} {LINK_OPTION}" if builder.get_target_file_path().endswith(".so") else line

    with _INDUCTOR:
        line_of = CppBuilder.get_command_line
        CppBuilder.get_command_line = with_option
        try:
            yield
        finally:
            CppBuilder.get_command_line = line_of


def check_runtime(path: Path) -> None:
    """Raise BuildError for a package with a C++ runtime of its own: what torch hands over to it belongs to another, and
    the process that loads it may end without a word."""
    with zipfile.ZipFile(path) as package:
        libraries = [package.read(name) for name in package.namelist() if name.endswith(".so")]
    if not all(any(name in library for name in SHARED_RUNTIMES) for library in libraries):
        raise BuildError(
            f"The C++ compiler {get_cpp_compiler()} put its runtime library into {path.stem}, and such a package "
            "cannot be loaded; set CXX to a compiler that links the shared libstdc++, as /usr/bin/g++ mostly does."
        )
