"""What the table `plugins.OPERATORS` says of one operator."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Operator:
    """One operator with all its faces.

    `name` is the name in the torch.library namespace `kvforge`, `schema` its signature there without the
    name. `reference` is the definition in plain torch, with the operator's arguments. `version` grows with
    every change of meaning; an engine records it. `faces` names the implementations that exist,
    `reference` first. `sources` are the C++ files of the `cpu` face.
    """

    name: str
    schema: str
    reference: Callable[..., Any]
    version: int
    faces: tuple[str, ...]
    sources: tuple[Path, ...]

    @property
    def qualified_name(self) -> str:
        return f"kvforge::{self.name}"
