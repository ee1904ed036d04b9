"""Packages that fail or are given up while the C++ compiler works on them; the engines of other tests are the rest."""

import json
import os
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.cpp_builder import CppBuilder
from torch._inductor.cpu_vec_isa import VecISA
from torch.export import ExportedProgram

from kvforge.common.build_paths import split_command
from kvforge.common.errors import BuildError
from kvforge.compiler import cpu_packages
from plugins.build import find_compiler
from tests.support.models.kept_answers import kept_answer

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def program() -> ExportedProgram:
    class Sine(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin()

    return torch.export.export(Sine(), (torch.ones(3),))


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen]:
    """The processes that the test started; temporary files are below ``tmp_path``."""
    processes: list[subprocess.Popen] = []
    popen = subprocess.Popen

    def recorded(*args, **kwargs) -> subprocess.Popen:
        processes.append(popen(*args, **kwargs))
        return processes[-1]

    monkeypatch.setattr(cpu_packages.subprocess, "Popen", recorded)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return processes


def run_instead(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    start = cpu_packages._Package._start
    monkeypatch.setattr(cpu_packages._Package, "_start", lambda self, _: start(self, ["sh", "-c", script]))


def test_a_failing_compiler_is_one_sentence(program, started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_instead(monkeypatch, "echo x.cpp: warning; echo x.cpp:7: error: no such thing; exit 1")
    with (
        pytest.raises(BuildError, match=r"could not compile sine: x.cpp:7: error: no such thing$"),
        cpu_packages.package_writer() as write,
    ):
        write(program, tmp_path / "sine.pt2")
    assert os.listdir(tmp_path) == []


def test_what_compiles_ends_with_the_build(program, started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_instead(monkeypatch, "exec sleep 600")
    with pytest.raises(KeyboardInterrupt), cpu_packages.package_writer() as write:
        write(program, tmp_path / "sine.pt2")
        assert [process.poll() for process in started].count(None) == 2
        raise KeyboardInterrupt
    assert all(process.returncode is not None for process in started)
    assert os.listdir(tmp_path) == []


def test_what_inductor_checks_is_left_out(program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If Inductor writes it differently one day, this says so; packages would only take longer to compile."""
    seen, without = [], cpu_packages.without_checks
    monkeypatch.setattr(cpu_packages, "without_checks", lambda text: seen.append((text, without(text))) or seen[-1][1])
    with cpu_packages.package_writer() as write:
        write(program, tmp_path / "sine.pt2")
    ((before, after),) = seen
    assert "static void check_input_0(" in before and 'getenv("AOTI_RUNTIME_CHECK_INPUTS")' in before
    assert "check_input_0" not in after and "AOTI_RUNTIME_CHECK_INPUTS" not in after
    assert torch.equal(
        torch._inductor.aoti_load_package(str(tmp_path / "sine.pt2"))(torch.ones(3)), torch.ones(3).sin()
    )


class Known(VecISA):
    _arch_flags = "-O1"


class Unknown(VecISA):
    _arch_flags = "-O1 -mno-such-extension"


def test_extensions_that_the_compiler_lacks_are_left_out(
    program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, methods = [], (CppBuilder.build, VecISA.check_build, CppBuilder.get_command_line)

    def compile_it(*_: Any, **__: Any) -> None:
        found.extend(isa.check_build("") for isa in (Known(), Unknown()))
        raise RuntimeError("enough")

    monkeypatch.setattr(torch._inductor, "aot_compile", compile_it)
    with pytest.raises(BuildError, match="enough"), cpu_packages.package_writer() as write:
        write(program, tmp_path / "sine.pt2")
    assert found == [True, False]
    assert methods == (CppBuilder.build, VecISA.check_build, CppBuilder.get_command_line)


def test_threads_compile_one_after_another(program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Inductor is made to do differently is the process's."""
    inside, overlaps, methods = [], [], (CppBuilder.build, VecISA.check_build, CppBuilder.get_command_line)

    def compile_it(*_: Any, **__: Any) -> None:
        inside.append(1)
        time.sleep(0.05)
        overlaps.append(len(inside) > 1)
        inside.pop()
        raise RuntimeError("enough")

    def compile_one(index: int) -> str:
        with pytest.raises(BuildError) as refused, cpu_packages.package_writer() as write:
            write(program, tmp_path / f"sine{index}.pt2")
        return str(refused.value)

    monkeypatch.setattr(torch._inductor, "aot_compile", compile_it)
    with ThreadPoolExecutor(4) as pool:
        said = list(pool.map(compile_one, range(4)))
    assert said == [f"AOTInductor could not compile sine{index}: enough" for index in range(4)]
    assert overlaps == [False] * 4
    assert methods == (CppBuilder.build, VecISA.check_build, CppBuilder.get_command_line)


@pytest.mark.parametrize("text", ["", "int main() { return check_inputs(1); }\n"])
def test_other_text_stays(text: str) -> None:
    assert cpu_packages.without_checks(text) == text


def test_a_package_that_cannot_be_written_is_one_sentence(
    program, started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's writer of archives says in a RuntimeError that the disk is full."""

    def fail(path: str, files: list[str]) -> None:
        raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")

    monkeypatch.setattr(cpu_packages, "package_aoti", fail)
    run_instead(monkeypatch, "exit 0")
    with (
        pytest.raises(BuildError, match="could not compile sine: PytorchStreamWriter failed writing"),
        cpu_packages.package_writer() as write,
    ):
        write(program, tmp_path / "sine.pt2")
    assert os.listdir(tmp_path) == []


SPACED = """
import json, sys, tempfile, torch
from pathlib import Path
from kvforge.compiler.cpu_packages import package_writer
class Sine(torch.nn.Module):
    def forward(self, x):
        return x.sin()
target = Path(sys.argv[1]) / "sine.pt2"
target.parent.mkdir()
with package_writer() as write:
    write(torch.export.export(Sine(), (torch.ones(3),)), target)
loaded = torch._inductor.aoti_load_package(str(target))
(stack,) = [line.split()[1] for line in open("/proc/self/maps") if line.endswith("[stack]\\n")]
is_sine = torch.equal(loaded(torch.ones(3)), torch.ones(3).sin())
print(json.dumps({"torch": torch.__file__, "temporary": tempfile.gettempdir(), "is_sine": is_sine, "stack": stack}))
"""


def test_spaces_in_the_names_of_folders(tmp_path: Path) -> None:
    """Of the environment, of temporary files and of the package; torch quotes some of them only."""
    compiler = subprocess.run([find_compiler(), "--version"], capture_output=True, text=True, check=True).stdout
    module = "tests.cpu.compiler.test_cpu_packages"
    said = kept_answer(module, compiler, lambda: said_below(tmp_path))
    assert "an environment" in said["torch"] and "temporary files" in said["temporary"] and said["is_sine"]
    assert "x" not in said["stack"]  # which the library asked for, as glibc from 2.41 on does not allow


def said_below(tmp_path: Path) -> dict[str, Any]:
    """What SPACED prints with such folders."""
    environment = tmp_path / "an environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    packages = next(environment.glob("lib/python*/site-packages"))
    packages.rmdir()
    packages.symlink_to(sysconfig.get_path("purelib"))
    temporary = tmp_path / "temporary files"
    temporary.mkdir()
    variables = os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)}
    variables.pop("TORCHINDUCTOR_CACHE_DIR", None)
    result = subprocess.run(
        [environment / "bin" / "python", "-c", SPACED, tmp_path / "a package"],
        env=variables,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_paths_are_kept_whole_quoted_or_not() -> None:
    line = "g++ /a b/x.cpp -I'/a b/c d/include' -L/a b/c d/lib -D X=1 -o /a b/x.o"
    words = ["g++", "/a b/x.cpp", "-I/a b/c d/include", "-L/a b/c d/lib", "-D", "X=1", "-o", "/a b/x.o"]
    assert split_command(line, ("/a b", "/a b/c d", "/plain")) == words
