"""Packages that earlier builds compiled: a graph that has been compiled on this machine is not compiled again.

A package holds no weights, so that models of one shape share theirs, whatever they were trained to. Its name is a
digest of all that decides its contents: the graph, torch, Inductor's configuration, the compiler and the machine.
"""

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from kvforge.common.hardware import cpu_isa
from kvforge.common.kept_file import write_kept
from kvforge.compiler import aot_inductor, cpu_packages, package_interface
from kvforge.manifest import sha256_of
from kvforge.version import __version__
from plugins.build import cache_dir

MAX_BYTES = 1 << 30
"""Of packages that are kept; the one last used longest ago goes first."""

_HALF_S = 3600
"""A file that is being copied into the cache has been whole for long by then."""

_INLINED = 8
"""Inductor writes the elements of constants of up to this many into its code."""

_WRITTEN_BY_INDUCTOR = "aot_inductor.metadata"
"""The one setting that compiling changes."""

_READ_BY_COMPILERS = ("TORCH", "ATEN", "CXX", "CPATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "GCC_")
"""How variables of the environment begin that Inductor and g++ read."""

_CACHE_DIR = "TORCHINDUCTOR_CACHE_DIR"
"""The one of them that Inductor sets itself, and that decides only where its files lie."""

Write = Callable[[ExportedProgram, Path], None]


def package_folder() -> Path:
    """Return where packages are kept, below ``$KVFORGE_CACHE``."""
    return cache_dir() / "packages"


def package_writer() -> contextlib.AbstractContextManager[Write]:
    """As ``cpu_packages.package_writer``, by way of the cache."""
    return keep_packages(cpu_packages.package_writer)


@contextlib.contextmanager
def keep_packages(writer: Callable[[], contextlib.AbstractContextManager[Write]]) -> Iterator[Write]:
    """Yield a function as ``writer`` does, which compiles what is not in the cache yet; when the block has been left,
    the new packages are there, too.

    A cache that cannot be read or written is none: the packages are compiled.

    Raises:
        BuildError: as ``writer`` does.
    """
    compiled: dict[str, Path] = {}
    with writer() as compile_package:

        def write(program: ExportedProgram, path: Path) -> None:
            key = package_key(program)
            if not _take(key, path):
                compile_package(program, path)
                compiled[key] = path

        yield write
    for key, path in compiled.items():
        with contextlib.suppress(OSError):
            _keep(key, path)


def package_key(program: ExportedProgram) -> str:
    """Return 32 hex digits that are equal for programs of which the same package is made here."""
    digest = hashlib.sha256(repr((_machine(), _signature(program), list(_nodes(program.graph)))).encode())
    for name, tensor in _inlined(program).items():
        digest.update(name.encode() + tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


def _machine() -> tuple[Any, ...]:
    sources = tuple(sha256_of(Path(str(module.__file__))) for module in (aot_inductor, cpu_packages, package_interface))
    config = torch._inductor.config.save_config_portable()
    settings = sorted((name, repr(value)) for name, value in config.items() if name != _WRITTEN_BY_INDUCTOR)
    read = [name for name in sorted(os.environ) if name.startswith(_READ_BY_COMPILERS) and name != _CACHE_DIR]
    chosen = [(name, os.environ[name]) for name in read]
    versions = (__version__, torch.__version__, sources, aot_inductor.compiler_version())
    return (*versions, settings, chosen, cpu_isa(), torch.get_num_threads())


def _signature(program: ExportedProgram) -> tuple[str, ...]:
    """Inputs, weights by name, results, and the sizes that each dimension may have."""
    signature, call = program.graph_signature, program.call_spec
    ranges = {str(symbol): str(bounds) for symbol, bounds in program.range_constraints.items()}
    specs = (signature.input_specs, signature.output_specs, call.in_spec, call.out_spec)
    weights = {name: _of_tensor(tensor) for name, tensor in program.state_dict.items()}
    return (*map(repr, specs), repr(ranges), repr(weights))


def _nodes(graph: fx.Graph) -> Iterator[tuple[Any, ...]]:
    """Yield each node as what it computes from which others, and what comes out."""
    for node in graph.nodes:
        target = str(getattr(node.target, "_schema", node.target))
        values = tuple(_of_value(value) for value in pytree.tree_leaves(node.meta.get("val")))
        yield node.op, node.name, target, repr(node.args), repr(node.kwargs), values


def _of_value(value: Any) -> Any:
    return _of_tensor(value) if isinstance(value, Tensor) else _of_size(value)


def _of_tensor(tensor: Tensor) -> tuple[Any, ...]:
    sizes = tuple(_of_size(size) for size in (*tensor.shape, *tensor.stride()))
    return str(tensor.dtype), str(tensor.device), sizes, tensor.requires_grad


def _of_size(size: Any) -> Any:
    """A size that may vary as its formula, with the value that it has in the example."""
    return (str(size.node.expr), size.node.hint) if isinstance(size, torch.SymInt) else repr(size)


def _inlined(program: ExportedProgram) -> Mapping[str, Tensor]:
    small = {name: tensor for name, tensor in program.state_dict.items() if tensor.numel() <= _INLINED}
    constants = {name: value for name, value in program.constants.items() if isinstance(value, Tensor)}
    return small | constants


def _take(key: str, path: Path) -> bool:
    """Whether there is such a package, whole; then it is copied to ``path`` and counts as used now."""
    kept = package_folder() / f"{key}.pt2"
    try:
        shutil.copyfile(kept, path)
        if sha256_of(path) == _digest_file(kept).read_text(encoding="ascii"):
            with contextlib.suppress(OSError):  # a cache that this user may only read
                os.utime(kept)
            return True
    except (OSError, ValueError):  # ValueError: a digest that is no text
        pass
    path.unlink(missing_ok=True)
    return False


def _keep(key: str, path: Path) -> None:
    kept = package_folder() / f"{key}.pt2"
    write_kept(kept, path.read_bytes())
    write_kept(_digest_file(kept), sha256_of(path).encode("ascii"))
    _forget()


def _digest_file(kept: Path) -> Path:
    return kept.with_suffix(".sha256")


def _forget() -> None:
    """Remove what is over MAX_BYTES, and the halves that killed builds left."""
    total = 0
    for half in package_folder().glob("*.*"):
        with contextlib.suppress(OSError):  # another process may have been faster
            if half.suffix[1:].isdecimal() and half.stat().st_mtime < time.time() - _HALF_S:
                half.unlink()
    found = [(path.stat(), path) for path in package_folder().glob("*.pt2")]
    for status, path in sorted(found, key=lambda one: -one[0].st_mtime):
        total += status.st_size
        if total > MAX_BYTES:
            path.unlink(missing_ok=True)
            _digest_file(path).unlink(missing_ok=True)
