"""Finds the operators: every folder on `plugins.__path__` with a `reference.py`."""

import importlib
import itertools
import keyword
import os
import re
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


_NAME = re.compile("[a-z][a-z0-9_]*")


def roots() -> list[Path]:
    """The folders that hold operators' folders: this package, then those of $KVFORGE_PLUGIN_PATH."""
    return [Path(path) for path in _PATH]


def _discover() -> dict[str, Operator[..., Any]]:
    for root in roots():
        if not root.is_dir():
            raise PluginError(f"$KVFORGE_PLUGIN_PATH names {root}, which is no folder; correct it.")
    folders = sorted((file.parent for root in roots() for file in root.glob("*/reference.py")), key=lambda f: f.name)
    for folder, following in itertools.pairwise(folders):
        if folder.name == following.name:
            raise PluginError(f"Two folders are the operator {folder.name}; rename one in $KVFORGE_PLUGIN_PATH.")
    return {folder.name: _load(folder) for folder in folders}


def _load(folder: Path) -> Operator[..., Any]:
    if not _NAME.fullmatch(folder.name) or keyword.iskeyword(folder.name):
        raise PluginError(f"The operator's folder {folder} has a name that no operator can have; use a-z, 0-9 and _.")
    try:
        operator = importlib.import_module(f"plugins.{folder.name}").OPERATOR
    except Exception as error:
        raise PluginError(f"The operator in {folder} cannot be loaded ({type(error).__name__}: {error}).") from error
    if not isinstance(operator, Operator):
        raise PluginError(f"The operator in {folder} has an OPERATOR that is no plugins.operator.Operator.")
    return operator


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
