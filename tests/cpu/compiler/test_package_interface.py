"""The half of packages that is the same for all graphs: compiled once, and only where it is what it was taken for."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from kvforge.compiler import cpu_packages, package_interface
from kvforge.compiler.package_interface import Interfaces, halves

COMMAND = "g++ a.wrapper.cpp -D ONE -O1 -I/some/include -include /some/header.h -c -o a.wrapper.o".split()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVFORGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def asked(build: Interfaces, text: str = "one", command: Sequence[str] = COMMAND) -> tuple[Path, list[str] | None]:
    return build.object_of(text, command, "a.wrapper.cpp", "a.wrapper.o")


def new_build(folder: Path) -> Interfaces:
    folder.mkdir()
    return Interfaces(folder)


def keep_one(folder: Path) -> Path:
    """Make and keep the object of a text; returns where it was made."""
    build = new_build(folder)
    made, command = asked(build)
    assert command == [*COMMAND[:1], str(folder / "interface-0.cpp"), *COMMAND[2:-1], str(made)]
    assert asked(build) == (made, None), "another package of this build"
    made.write_bytes(b"object")
    build.keep()
    return made


def test_a_text_is_divided_where_torchs_interface_ends() -> None:
    interface = package_interface._INTERFACE.read_text()
    parts = halves(f"#include <first>\n{interface}int graph;\n")
    assert parts is not None
    assert parts[0].startswith(f"#include <first>\n{interface}template class ") and "int graph" not in parts[0]
    assert parts[1].startswith("#include <first>\n#include <torch") and parts[1].endswith(">;\nint graph;\n")
    assert "AOTInductorModelContainerRun" in parts[0] and "AOTInductorModelContainerRun" not in parts[1]


def test_another_text_stays_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interface = package_interface._INTERFACE.read_text()
    assert halves(interface.replace("extern", "extern ", 1) + "int graph;\n") is None
    monkeypatch.setattr(package_interface, "_INTERFACE", tmp_path / "none")
    assert halves(interface + "int graph;\n") is None


def test_an_object_is_made_once(tmp_path: Path) -> None:
    made = keep_one(tmp_path / "build")
    kept, command = asked(new_build(tmp_path / "next"))
    assert command is None and kept != made and kept.read_bytes() == b"object"


@pytest.mark.parametrize(
    "found", [b"", b"garbage", b"object" + bytes(32), None], ids=["empty", "short", "other", "none"]
)
def test_an_object_that_is_not_whole_is_made_anew(found: bytes | None, cache: Path, tmp_path: Path) -> None:
    keep_one(tmp_path / "build")
    (kept,) = (cache / "objects").iterdir()
    whole = kept.read_bytes()
    if found is None:
        kept.unlink()
        kept.mkdir()  # as one that may not be read
        assert asked(new_build(tmp_path / "next"))[1] is not None
        return
    kept.write_bytes(found)
    keep_one(tmp_path / "next")
    assert kept.read_bytes() == whole


@pytest.mark.parametrize(
    "change",
    ["text", "flag", "definition", "compiler", "cpu_isa", "compiler_version", "the folders alone"],
)
def test_an_object_is_of_one_text_compiler_and_machine(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_one(tmp_path / "build")
    text, command = "one", list(COMMAND)
    if change == "text":
        text = "another"
    elif change == "flag":
        command[command.index("-O1")] = "-O2"
    elif change == "definition":
        command[command.index("ONE")] = "TWO"
    elif change == "compiler":
        command[0] = "one-that-calls-g++"
    elif change == "the folders alone":
        command = [word.replace("/some/", "/other/") for word in command]
    else:
        monkeypatch.setattr(package_interface, change, lambda: ("another",) if change == "cpu_isa" else "another")
    assert (asked(new_build(tmp_path / "next"), text, command)[1] is None) == (change == "the folders alone")


def test_a_cache_that_cannot_be_written_is_none(cache: Path, tmp_path: Path) -> None:
    cache.write_text("a file")
    keep_one(tmp_path / "build")
    assert cache.read_text() == "a file"


class Of(torch.nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(x, self._name)()


def test_packages_share_it(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gives what its operation, an exact one, does; a later build takes the object up."""
    commands, popen = [], subprocess.Popen

    def recorded(command: list[str], *args, **kwargs) -> subprocess.Popen:
        commands.append(command)
        return popen(command, *args, **kwargs)

    monkeypatch.setattr(cpu_packages.subprocess, "Popen", recorded)
    x = torch.rand(3) - 0.5
    for builds, names in enumerate((("neg", "abs"), ("floor",))):
        with cpu_packages.package_writer() as write:
            for name in names:
                write(torch.export.export(Of(name), (torch.ones(3),)), tmp_path / f"{name}.pt2")
        compiled = [word for command in commands for word in command if word.endswith("interface-0.cpp")]
        assert len(compiled) == 1, f"build {builds}"
        for name in names:
            assert torch.equal(torch._inductor.aoti_load_package(str(tmp_path / f"{name}.pt2"))(x), getattr(x, name)())
    assert len(list((cache / "objects").iterdir())) == 1
