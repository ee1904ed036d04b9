"""Model families by name: those of the files in this folder, and those of other packages."""

import functools
import importlib
import pkgutil
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from model_defs.family import Family

ENTRY_POINTS = "kvforge.model_defs"
"""The group of entry points by which other packages add families."""


def families() -> dict[str, Family]:
    """Return every family by ``model_type``: those of this package in alphabetical order, then those of entry points.

    They are looked for at the first call, not at import: a family's file imports this package.
    """
    return _found()[0]


def broken_families() -> dict[str, str]:
    """Return, by the names of their entry points, why families of other packages could not be loaded."""
    return _found()[1]


def family_of(hf: Mapping[str, Any]) -> Family | None:
    """Return the family of the contents of a ``config.json``, plain or with a SwiftKV cut; None for an unknown one."""
    model_type = hf.get("model_type")
    return families().get(model_type.removesuffix("_swiftkv")) if isinstance(model_type, str) else None


@functools.cache
def _found() -> tuple[dict[str, Family], dict[str, str]]:
    """What other packages bring may be broken: that concerns those alone who ask for it."""
    found: dict[str, Family] = {}
    broken: dict[str, str] = {}
    package = __package__ or ""
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
        if hasattr(defined := importlib.import_module(module.name), "FAMILY"):
            _add(found, defined.FAMILY)
    for entry in sorted(entry_points(group=ENTRY_POINTS), key=lambda entry: entry.name):
        try:
            _add(found, entry.load())
        except BaseException as error:  # a module may even try to end the process
            if isinstance(error, KeyboardInterrupt):
                raise
            broken[entry.name] = f"{entry.value}: {(str(error).splitlines() or [type(error).__name__])[0]}"
    return found, broken


def _add(found: dict[str, Family], family: object) -> None:
    if not isinstance(family, Family):
        raise TypeError("this is no Family")
    if found.setdefault(family.model_type, family) is not family:
        raise ValueError(f"there is a model family {family.model_type!r} already")
