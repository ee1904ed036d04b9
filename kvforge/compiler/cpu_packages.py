"""AOTInductor packages of CPU graphs: the C++ compiler works on one while Inductor generates the next."""

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch._inductor.cpp_builder import CppBuilder, get_cpp_compiler
from torch._inductor.cpu_vec_isa import VecISA
from torch._inductor.package import package_aoti
from torch.export import ExportedProgram

from kvforge.common.build_paths import build_paths, split_command
from kvforge.common.errors import BuildError, first_line
from kvforge.compiler.aot_inductor import INDUCTOR_CONFIG, check_runtime, plain_stacks
from kvforge.compiler.package_interface import Interfaces, halves
from kvforge.compiler.trace import without_lines

_CONFIG = {**INDUCTOR_CONFIG, "aot_inductor.package": True, "cpp.vec_isa_ok": True}

_INPUT_CHECK = re.compile(
    r"AOTI_NOINLINE static void check_input_\d+\(.*?\n\}\n|^ *check_input_\d+\(.*?\);\n", re.S | re.M
)
"""Functions of Inductor's that check the inputs of a graph, and their calls."""
_ASKED = re.compile(r"(static bool _check_aoti_runtime_check_inputs_env\(\) \{).*?\n\}", re.DOTALL)
"""Whether they are asked for, in the environment."""


def without_checks(source: str) -> str:
    """Return Inductor's C++ without its checks of inputs, more than half of what it has for a small graph: sessions
    bind what the graph was exported with. Text that has other checks is returned as it is."""
    return _ASKED.sub(r"\1 return false; }", _INPUT_CHECK.sub("", source))


def _is_known(isa: VecISA, code: str) -> bool:
    """Whether the C++ compiler has a vector extension of this CPU: g++ 12 lacks AMX-FP16. torch's own probe compiles a
    program and loads it, for each of them."""
    flags = isa.build_arch_flags().split()
    command = [get_cpp_compiler(), *flags, "-fsyntax-only", "-x", "c++", os.devnull]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


class _Package:
    """One graph on its way to a package. Inductor's calls of the C++ compiler are taken over: objects are made beside
    the caller's next work, and the library when they are there, in a folder of the graph's own."""

    def __init__(self, path: Path, folder: Path, interfaces: Interfaces) -> None:
        self._path = path
        self._interfaces = interfaces
        self._folder = folder / path.stem
        self._folder.mkdir()
        self._own: dict[str, str] = {}  # Inductor's paths of objects and of the library to the ones in the folder
        self._running: list[tuple[subprocess.Popen, Path]] = []  # and the file of what it says
        self._link: list[str] = []
        self._interface: Path | None = None
        self._files: list[str] = []

    def generate(self, program: ExportedProgram) -> None:
        """Generate the C++ and start its compilation."""
        paths = build_paths()

        def build(builder: CppBuilder) -> None:
            target = builder.get_target_file_path()
            command = split_command(builder.get_command_line(), paths)  # torch quotes some paths of it and others not
            self._own[target] = str(self._folder / Path(target).name)
            if target.endswith((".wrapper.o", ".kernel.o")):
                Path(target).touch()  # to be removed by Inductor
                for source in [word for word in command if word.endswith(".wrapper.cpp")]:
                    self._divide(source, target, command)
                self._start(command)
            elif target.endswith(".wrapper.so"):
                self._link = self._with_interface(command)
            else:
                self._compile(command, Path(target).parent)
                if target.endswith(".weights.o"):  # of no bytes; removed by Inductor
                    shutil.copyfile(target, self._own[target])

        try:
            with torch.no_grad(), plain_stacks(), without_lines():
                compile_now, probe = CppBuilder.build, VecISA.check_build
                CppBuilder.build, VecISA.check_build = build, _is_known
                try:
                    module, (args, kwargs) = program.module(check_guards=False), program.example_inputs
                    self._files = torch._inductor.aot_compile(module, args, kwargs, options=dict(_CONFIG))
                finally:
                    CppBuilder.build, VecISA.check_build = compile_now, probe
        except Exception as error:
            raise self._error(first_line(error)) from error

    def finish(self) -> None:
        """Wait for the objects, link them and write the package."""
        self._wait()
        self._start(self._link)
        self._wait()
        try:
            package_aoti(str(self._path), [self._own.get(file, file) for file in self._files])
        except RuntimeError as error:  # torch's writer hides what stopped it
            raise self._error(first_line(error)) from error
        check_runtime(self._path)

    def stop(self) -> None:
        """End what runs."""
        for process, _ in self._running:
            process.kill()
            process.wait()

    def _compile(self, command: list[str], folder: Path) -> None:
        """Run a command of Inductor's as it is, and wait for it."""
        folder.mkdir(parents=True, exist_ok=True)
        result = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if result.returncode != 0:
            raise self._error(_first_error(result.stdout))

    def _divide(self, source: str, target: str, command: list[str]) -> None:
        """Put in the place of Inductor's C++ what the graph has of its own, without checks, and see to the rest."""
        text = without_checks(Path(source).read_text(encoding="utf-8"))
        if (parts := halves(text)) is not None:
            interface, text = parts
            self._interface, missing = self._interfaces.object_of(interface, command, source, target)
            if missing is not None:
                self._start(missing)
        own = self._folder / Path(source).name
        own.write_text(text, encoding="utf-8")
        self._own[source] = str(own)

    def _with_interface(self, command: list[str]) -> list[str]:
        """Return the command that links the library, with the interface before what it needs of other libraries."""
        index = next(index for index, word in enumerate(command) if word.endswith(".wrapper.o"))
        own = [] if self._interface is None else [str(self._interface)]
        return [*command[:index], *own, *command[index:]]

    def _start(self, command: list[str]) -> None:
        own = [self._own.get(word, word) for word in command]
        said = self._folder / f"said-{len(self._running)}.txt"  # no pipe: a full one would stop the compiler
        with said.open("w") as output:
            self._running.append((subprocess.Popen(own, stdout=output, stderr=subprocess.STDOUT), said))

    def _wait(self) -> None:
        while self._running:
            process, said = self._running[0]
            process.wait()
            self._running.pop(0)
            if process.returncode != 0:
                raise self._error(_first_error(said.read_text(errors="replace")))

    def _error(self, why: str) -> BuildError:
        return BuildError(f"AOTInductor could not compile {self._path.stem}: {why}")


def _first_error(output: str) -> str:
    lines = output.strip().splitlines() or ["no message"]
    return next((line for line in lines if "error" in line), lines[-1])


@contextlib.contextmanager
def package_writer() -> Iterator[Callable[[ExportedProgram, Path], None]]:
    """Yield a function that compiles a program for an AOTInductor package (``*.pt2``) without its weights; the
    packages are there when the block has been left.

    Raises:
        BuildError: code generation or the C++ compiler failed.
    """
    with tempfile.TemporaryDirectory(prefix="kvforge-") as folder, contextlib.ExitStack() as running:
        packages: list[_Package] = []
        interfaces = Interfaces(Path(folder))

        def write(program: ExportedProgram, path: Path) -> None:
            packages.append(_Package(path, Path(folder), interfaces))
            running.callback(packages[-1].stop)
            packages[-1].generate(program)

        yield write
        for package in packages:
            package.finish()
        interfaces.keep()
