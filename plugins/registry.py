"""Finds the operators: every folder on `plugins.__path__` with a `reference.py`."""

import importlib
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from plugins.errors import PluginError
from plugins.operator import BACKEND_FILES, Operator

_PATH: list[str] = sys.modules["plugins"].__path__  # type: ignore[assignment]
"""Where Python looks for the folders of operators, by reference: the package imports this module."""
_PATH += [
    str(Path(folder).resolve()) for folder in os.environ.get("KVFORGE_PLUGIN_PATH", "").split(os.pathsep) if folder
]


def roots() -> list[Path]:
    """The folders that hold operators' folders: this package, then those of $KVFORGE_PLUGIN_PATH."""
    return [Path(path) for path in _PATH]


def _discover() -> dict[str, Operator[..., Any]]:
    names = sorted(file.parent.name for root in roots() for file in root.glob("*/reference.py"))
    for name, following in itertools.pairwise(names):
        if name == following:
            raise PluginError(f"Two folders are the operator {name}; rename one of those in $KVFORGE_PLUGIN_PATH.")
    return {name: importlib.import_module(f"plugins.{name}").OPERATOR for name in names}


OPERATORS = _discover()
"""Every operator by its name, in alphabetical order."""


def backend_modules(backend: str) -> dict[str, ModuleType]:
    """The Python module of a backend for each operator that has it, by the operator's name."""
    stem = Path(BACKEND_FILES[backend]).stem
    return {
        name: importlib.import_module(f"plugins.{name}.{stem}")
        for name, operator in OPERATORS.items()
        if backend in operator.backends
    }


def modules(stem: str) -> Iterator[tuple[str, ModuleType]]:
    """Name and module of each operator that has `<stem>.py` in its folder."""
    for name, operator in OPERATORS.items():
        if (operator.folder / f"{stem}.py").is_file():
            yield name, importlib.import_module(f"plugins.{name}.{stem}")
