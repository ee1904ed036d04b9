"""Loading AOTInductor packages and the one weights file that they share."""

import contextlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvforge.common.errors import EngineError, first_line
from kvforge.manifest import WEIGHTS_FILE, GraphCalls, calls_file, load_calls, package_file, piece_file
from kvforge.runtime.sessions.huge_pages import allocate_together

Graph = Callable[[list[Tensor]], list[Tensor]]
"""A compiled graph: flat inputs to flat outputs."""

_TMPDIR_LOCK = threading.Lock()


def load_weights(engine_dir: Path, device: str = "cpu") -> dict[str, Tensor]:
    """Return all weights by name; on the CPU in one piece of memory of large pages, aligned.

    Raises:
        EngineError: the file is damaged, or there is no memory for it.
    """
    if torch.device(device).type != "cpu":
        return load_tensors(engine_dir, None, device)
    with _readable(engine_dir / WEIGHTS_FILE) as file:
        return _in_large_pages(file)


def load_tensors(engine_dir: Path, names: Sequence[str] | None, device: str) -> dict[str, Tensor]:
    """Return those weights that have these names, all where None is given; raises EngineError as ``load_weights``
    does."""
    with _readable(engine_dir / WEIGHTS_FILE) as path, safe_open(path, framework="pt", device=device) as file:
        return {name: file.get_tensor(name) for name in (file.keys() if names is None else names)}


@contextlib.contextmanager
def _readable(file: Path) -> Iterator[Path]:
    try:
        yield file
    except (SafetensorError, OSError) as error:
        raise EngineError(f"{file} is damaged ({error}); rebuild the engine.") from error
    except MemoryError as error:
        raise EngineError(f"there is no memory for {file} ({error}); free some.") from error


def _in_large_pages(path: Path) -> dict[str, Tensor]:
    """Copies of a file's tensors, which is mapped in pages of 4 KiB: anew for each tensor, so that one at a time is in
    memory twice."""
    with safe_open(path, framework="pt") as file:
        mapped = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        layout = {name: (tensor.shape, tensor.dtype) for name, tensor in mapped.items()}
        del mapped
    copies = dict(zip(layout, allocate_together(list(layout.values())), strict=True))
    for name, copy in copies.items():
        with safe_open(path, framework="pt") as file:
            copy.copy_(file.get_tensor(name))
    return copies


@contextlib.contextmanager
def private_tmpdir() -> Iterator[None]:
    """For packages of CPU code, which is mapped: their unpacked files go as soon as they are loaded, so that a killed
    process leaves none behind."""
    with (
        tempfile.TemporaryDirectory(prefix="kvforge-", ignore_cleanup_errors=True) as folder,
        unpacking_into(folder),
    ):
        yield


@contextlib.contextmanager
def unpacking_into(folder: str) -> Iterator[None]:
    """Packages that are loaded within the block are unpacked below ``folder``. GPU kernels lie there as files that are
    read when a kernel first runs, so they have to stay. $TMPDIR is the process's, so loads take turns."""
    with _TMPDIR_LOCK:
        before = os.environ.get("TMPDIR")
        os.environ["TMPDIR"] = folder
        try:
            yield
        finally:
            os.environ.pop("TMPDIR")
            if before is not None:
                os.environ["TMPDIR"] = before


def load_graph(engine_dir: Path, name: str, weights: dict[str, Tensor], single_threaded: bool = False) -> Graph:
    """Load a graph of an engine, one package or pieces; as ``load_package`` otherwise.

    Raises:
        EngineError: a package cannot be loaded, needs a weight that is not there, or how pieces are called is damaged.
    """
    if not (file := engine_dir / calls_file(name)).is_file():
        return load_package(engine_dir / package_file(name), weights, single_threaded)
    try:
        calls = load_calls(file)
    except (OSError, ValueError) as error:
        raise EngineError(f"{file} is damaged ({first_line(error)}); rebuild the engine.") from error
    pieces = []
    for call in calls.calls:
        path = engine_dir / piece_file(name, call.package)
        own = {inside: _weight(weights, tensor, path) for inside, tensor in call.weights.items()}
        pieces.append(load_package(path, own, single_threaded))
    return run_in_turn(calls, pieces)


def run_in_turn(calls: GraphCalls, pieces: Sequence[Graph]) -> Graph:
    """Return a graph that runs the pieces of ``calls`` one after the other, each value dropped after its last use."""
    steps = [(piece, call.inputs, last) for piece, call, last in zip(pieces, calls.calls, calls.last_uses, strict=True)]

    def run(inputs: list[Tensor]) -> list[Tensor]:
        values: list[Any] = list(inputs)
        for piece, needed, last in steps:
            values += piece([values[index] for index in needed])
            for index in last:
                values[index] = None
        return [values[index] for index in calls.outputs]

    return run


def load_package(path: Path, weights: dict[str, Tensor], single_threaded: bool = False) -> Graph:
    """Load an AOTInductor package, within ``private_tmpdir`` or ``unpacking_into``, and bind ``weights`` without
    copying them: the caller keeps them alive. ``single_threaded`` drops what lets several threads call the graph, as
    CUDA graphs demand.

    Raises:
        EngineError: the package cannot be loaded or needs a weight that is not there.
    """
    try:
        # What torch._inductor.aoti_load_package wraps; that module takes a second to import.
        graph = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", single_threaded, 1, -1)
        constants = {name: _weight(weights, name, path) for name in graph.get_constant_fqns()}
        inactive, whole, user_managed = False, True, True
        graph.load_constants(constants, inactive, whole, user_managed)
    except EngineError:
        raise
    except Exception as error:
        why = first_line(error)
        no_room = "write callback failed" in why  # of the package's unpacking
        advice = "make room in the folder for temporary files ($TMPDIR)" if no_room else "rebuild the engine"
        raise EngineError(f"{path} cannot be loaded ({why}); {advice}.") from error
    return graph.boxed_run


def _weight(weights: Mapping[str, Tensor], name: str, package: Path) -> Tensor:
    if name not in weights:
        raise EngineError(f"{package} needs the weight {name!r}, which the engine lacks; rebuild the engine.")
    return weights[name]
