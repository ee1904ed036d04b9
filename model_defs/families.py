"""Model families by name: those of the files in this folder, and those of other packages."""

import functools
import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from typing import Any

from model_defs.family import Family

ENTRY_POINTS = "kvforge.model_defs"
"""The group of entry points by which other packages add families."""


@functools.cache
def families() -> dict[str, Family]:
    """Return every family by ``model_type``: those of this package in alphabetical order, then those of entry points.

    They are looked for at the first call, not at import: a family's file imports this package.
    """
    found: dict[str, Family] = {}
    for family in _discover():
        if found.setdefault(family.model_type, family) is not family:
            raise ValueError(f"there is a model family {family.model_type!r} already")
    return found


def family_of(hf: Mapping[str, Any]) -> Family | None:
    """Return the family of the contents of a ``config.json``, plain or with a SwiftKV cut; None for an unknown one."""
    model_type = hf.get("model_type")
    return families().get(model_type.removesuffix("_swiftkv")) if isinstance(model_type, str) else None


def _discover() -> Iterator[Family]:
    package = __package__ or ""
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
        if hasattr(defined := importlib.import_module(module.name), "FAMILY"):
            yield defined.FAMILY
    for entry in sorted(entry_points(group=ENTRY_POINTS), key=lambda entry: entry.name):
        yield entry.load()
