"""Packages are compiled once: what is taken from the cache is what would be compiled, and nothing else is taken."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from kvforge.common.errors import BuildError
from kvforge.compiler import aot_inductor, package_cache
from kvforge.compiler.package_cache import keep_packages, package_folder, package_key


class Affine(nn.Module):
    """x · weight + a constant."""

    def __init__(self, size: int = 4, add: float = 1.0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, size, dtype=dtype), requires_grad=False)
        self.add = add

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.add


class Constant(nn.Module):
    """x + a tensor that is so small that Inductor writes its elements into its code."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.register_buffer("value", torch.full((2,), value))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.value


def exported(module: nn.Module, x: Tensor | None = None, dynamic: bool = False) -> ExportedProgram:
    x = torch.ones(5, 3) if x is None else x
    return torch.export.export(module, (x,), dynamic_shapes=({0: Dim.DYNAMIC},) if dynamic else None, strict=False)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVFORGE_CACHE", str(tmp_path / "cache"))
    return package_folder()


@pytest.fixture
def compiled() -> list[ExportedProgram]:
    """What the compiler was given."""
    return []


@pytest.fixture
def write(compiled: list[ExportedProgram]) -> Callable[[ExportedProgram, Path], None]:
    """Writes one package by way of the cache, with a compiler whose packages have the graph's text."""

    @contextlib.contextmanager
    def writer() -> Iterator[package_cache.Write]:
        def compile_package(program: ExportedProgram, path: Path) -> None:
            compiled.append(program)
            path.write_text(program.graph_module.code)

        yield compile_package

    def write_one(program: ExportedProgram, path: Path) -> None:
        with keep_packages(writer) as write_package:
            write_package(program, path)

    return write_one


def test_models_of_one_shape_share_their_packages(write, compiled, tmp_path: Path) -> None:
    for index in range(3):
        write(exported(Affine()), tmp_path / f"{index}.pt2")
    assert len(compiled) == 1
    assert len({(tmp_path / f"{index}.pt2").read_bytes() for index in range(3)}) == 1


DIFFERENT = {
    "another size": exported(Affine(size=5)),
    "another constant in the code": exported(Affine(add=2.0)),
    "another dtype": exported(Affine(dtype=torch.bfloat16), torch.ones(5, 3, dtype=torch.bfloat16)),
    "another example": exported(Affine(), torch.ones(6, 3)),
    "sizes that vary": exported(Affine(), dynamic=True),
    "another example of a size that varies": exported(Affine(), torch.ones(6, 3), dynamic=True),
    "another layout": exported(Affine(), torch.ones(3, 5).t()),
    "a small buffer": exported(Constant(1.0), torch.ones(2)),
    "another small buffer": exported(Constant(2.0), torch.ones(2)),
}


def test_graphs_that_differ_in_anything_have_names_of_their_own() -> None:
    keys = {"the graph": package_key(exported(Affine()))} | {name: package_key(one) for name, one in DIFFERENT.items()}
    assert len(set(keys.values())) == len(keys)


def test_names_depend_on_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    program = exported(Affine())
    keys = [package_key(program)]
    for module, name, value in [
        (package_cache, "cpu_isa", lambda: ("x86_64", "other")),
        (package_cache, "__version__", "0"),
        (aot_inductor, "get_cpp_compiler", lambda: "ls"),
    ]:
        with monkeypatch.context() as changed:
            changed.setattr(module, name, value)
            keys.append(package_key(program))
    with torch._inductor.config.patch({"cpp.simdlen": 128}):
        keys.append(package_key(program))
    for name in ("CXXFLAGS", "ATEN_CPU_CAPABILITY", "CPATH"):
        monkeypatch.setenv(name, "other")
        keys.append(package_key(program))
    assert len(set(keys)) == len(keys)


def test_names_do_not_depend_on_what_was_compiled_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor sets this variable when it compiles first, and notes in its configuration what it compiled for."""
    program = exported(Affine())
    key = package_key(program)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    with torch._inductor.config.patch({"aot_inductor.metadata": {"AOTI_DEVICE_KEY": "cpu"}}):
        assert package_key(program) == key


@pytest.mark.parametrize("content", [b"half of it", b"\xff\xfe"])
@pytest.mark.parametrize("suffix", [".pt2", ".sha256"])
def test_a_damaged_package_is_compiled_again(
    write, compiled, cache: Path, tmp_path: Path, suffix: str, content: bytes
) -> None:
    write(exported(Affine()), tmp_path / "first.pt2")
    (damaged,) = cache.glob(f"*{suffix}")
    damaged.write_bytes(content)
    for index in range(2):
        write(exported(Affine()), tmp_path / f"{index}.pt2")
        assert (tmp_path / f"{index}.pt2").read_bytes() == (tmp_path / "first.pt2").read_bytes()
    assert len(compiled) == 2


def test_a_cache_that_cannot_be_written_stops_no_build(write, compiled, cache: Path, tmp_path: Path) -> None:
    cache.parent.mkdir()
    cache.write_text("a file where the folder belongs")
    write(exported(Affine()), tmp_path / "package.pt2")
    assert (tmp_path / "package.pt2").exists() and len(compiled) == 1


def test_a_build_that_fails_leaves_no_package(cache: Path, tmp_path: Path) -> None:
    @contextlib.contextmanager
    def writer() -> Iterator[package_cache.Write]:
        yield lambda program, path: path.write_text("not linked yet")
        raise BuildError("the linker failed")

    with pytest.raises(BuildError), keep_packages(writer) as write_package:
        write_package(exported(Affine()), tmp_path / "package.pt2")
    assert not cache.exists()


def test_halves_that_killed_builds_left_go(write, cache: Path, tmp_path: Path) -> None:
    cache.mkdir(parents=True)
    old, new = cache / "0123.4567", cache / "0123.4568"
    for half in (old, new):
        half.write_text("half of a package")
    hours_ago = time.time() - 2 * package_cache._HALF_S
    os.utime(old, (hours_ago, hours_ago))
    write(exported(Affine()), tmp_path / "package.pt2")
    assert not old.exists() and new.exists()


def test_what_was_used_longest_ago_goes_first(
    write, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = len(exported(Affine()).graph_module.code)
    monkeypatch.setattr(package_cache, "MAX_BYTES", 3 * size)
    programs = [exported(Affine(add=float(add))) for add in range(1, 5)]
    for index, program in enumerate([*programs[:3], programs[0], programs[3]]):
        write(program, tmp_path / f"{index}.pt2")
    kept = {path.stem for path in cache.glob("*.pt2")}
    assert kept == {package_key(programs[index]) for index in (0, 2, 3)}
    assert {path.stem for path in cache.glob("*.sha256")} == kept
