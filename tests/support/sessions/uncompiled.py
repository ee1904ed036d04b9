"""Engines of target ``cpu`` that no C++ compiler had a part in: torch runs the exported graphs.

All else is the product's own: the build with the checks of its graphs, the directory, what loads it, the session. Only
AOTInductor, which takes most of a build's time, is left out. What it makes of a graph is not tested by it.
"""

import contextlib
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx.graph import CodeGen
from torch.utils import _pytree as pytree

from kvforge.compiler.targets import cpu as target
from kvforge.runtime.sessions import aot_package
from kvforge.runtime.sessions.aot_package import Graph
from tests.support.models.engines import EngineSpec
from tests.support.models.shelf import EngineShelf

NAME_BYTES = 16


class Programs:
    """Exported graphs by what stands in the files of their packages. This process alone can load such an engine."""

    def __init__(self) -> None:
        self._programs: dict[bytes, ExportedProgram] = {}

    def take_the_place_of_compilation(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Leave uncompiled what is built until ``monkeypatch`` is undone."""

        @contextlib.contextmanager
        def package_writer() -> Iterator[Callable[[ExportedProgram, Path], None]]:
            yield self._write

        monkeypatch.setattr(target, "package_writer", package_writer)

    def be_loaded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Load these engines too until ``monkeypatch`` is undone; what was compiled is loaded as ever."""
        load_compiled = aot_package.load_package

        def load_package(path: Path, weights: dict[str, Tensor], *options: Any) -> Graph:
            with path.open("rb") as file:
                program = self._programs.get(file.read(NAME_BYTES))
            return load_compiled(path, weights, *options) if program is None else _graph(program, weights)

        monkeypatch.setattr(aot_package, "load_package", load_package)

    def _write(self, program: ExportedProgram, path: Path) -> None:
        name = uuid.uuid4().bytes
        self._programs[name] = program
        path.write_bytes(name)


def leave_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until ``monkeypatch`` is undone, leave the engines that this process builds uncompiled. The shelf, whose engines
    are for all, gives none meanwhile."""

    def refuse(*_: object) -> NoReturn:
        pytest.fail("the shelf has compiled engines; build this one in the test")

    programs = Programs()
    programs.take_the_place_of_compilation(monkeypatch)
    programs.be_loaded(monkeypatch)
    monkeypatch.setattr(EngineShelf, "engine", refuse)


class UncompiledShelf(EngineShelf):
    """As ``EngineShelf``, for this process until ``monkeypatch`` is undone; checkpoints are those of ``shelf``."""

    def __init__(self, shelf: EngineShelf, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self._shelf, self._programs = folder, shelf, Programs()
        self._programs.be_loaded(monkeypatch)

    def checkpoint(self, spec: EngineSpec) -> Path:
        return self._shelf.checkpoint(spec)

    def engine(self, spec: EngineSpec) -> Path:
        with pytest.MonkeyPatch.context() as monkeypatch:
            self._programs.take_the_place_of_compilation(monkeypatch)
            return super().engine(spec)


def _graph(program: ExportedProgram, weights: dict[str, Tensor]) -> Graph:
    module = program.module(check_guards=False)
    module._forward_pre_hooks.clear()  # a compiled graph does not compare its inputs' sizes with the example's either
    module.load_state_dict({name: weights[name] for name in module.state_dict()}, assign=True)
    module.graph.set_codegen(CodeGen())  # flat inputs and outputs, as a compiled graph has them
    module.recompile()

    @torch.inference_mode()
    def run(inputs: list[Tensor]) -> list[Tensor]:
        return pytree.tree_leaves(module.forward(*inputs))

    return run
