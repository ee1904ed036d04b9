"""Loads the compiled operator library into this process, at most one version of it."""

import re
import threading
from dataclasses import dataclass
from pathlib import Path

import torch

from plugins import build, units
from plugins.errors import PluginLoadError

_MARKER = re.compile(rb"kvforge-operators sources=([0-9a-f]+) torch=([^;]+);(?: isas=([a-z0-9_,]*);)?")


@dataclass(frozen=True)
class LoadedLibrary:
    """The library in this process: the file, the hash of the sources it was compiled from, and for which instruction
    sets; none where it does not say, and then it was for all."""

    path: Path
    sources: str
    isas: tuple[str, ...]


_lock = threading.Lock()
_loaded: LoadedLibrary | None = None


def load_library(path: Path | str | None = None) -> Path:
    """Makes the compiled CPU kernels available and returns the file they come from.

    Without `path` the kernels are compiled into the user's cache if need be; with it, the given file (an
    engine's copy) is loaded. Idempotent: a library of the same sources is loaded once, whatever its path.
    Raises PluginBuildError when it cannot be compiled, and PluginLoadError when the file is missing, is no
    operator library, was built for another torch, or another version is in this process already.
    """
    global _loaded
    with _lock:
        sources = units.sources_version() if path is None else _marked(Path(path)).sources
        if _loaded is not None:
            if _loaded.sources == sources:
                return _loaded.path
            raise PluginLoadError(
                f"Another version of the operator library is loaded in this process ({_loaded.path}) than "
                f"{'the installed one' if path is None else path}; build both engines with one version of kvforge, or "
                "use a process for each."
            )
        file = build.build_library() if path is None else Path(path)
        try:
            torch.ops.load_library(str(file))
        except OSError as error:
            raise PluginLoadError(
                f"The operator library {file} does not load on this machine ({error}); rebuild it here."
            ) from error
        _loaded = _marked(file)
        return file


def has_kernels_for(isa: str) -> bool:
    """Whether the library in this process was compiled for an instruction set, too."""
    return _loaded is not None and (isa in _loaded.isas or not _loaded.isas)


def _marked(path: Path) -> LoadedLibrary:
    """Checks the file's marker and returns what it says."""
    try:
        match = _MARKER.search(path.read_bytes())
    except OSError as error:
        raise PluginLoadError(
            f"The operator library {path} cannot be read ({error.strerror}); rebuild the engine."
        ) from error
    if match is None:
        raise PluginLoadError(f"{path} is not an operator library of kvforge; rebuild the engine.")
    torch_version = match[2].decode()
    if torch_version != torch.__version__:
        raise PluginLoadError(
            f"The operator library {path} was built for torch {torch_version} and this is torch "
            f"{torch.__version__}; rebuild the engine or install that torch."
        )
    return LoadedLibrary(path, match[1].decode(), tuple(match[3].decode().split(",")) if match[3] else ())
