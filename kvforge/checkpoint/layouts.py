"""Shapes and dtypes of what safetensors files hold, read once: opening a file costs time for each of its tensors."""

from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open

TensorLayout = tuple[tuple[int, ...], str]
"""A tensor's shape, and its dtype in safetensors' spelling."""


class TensorLayouts:
    """Those of the files of an opened checkpoint, each as it was when it was first asked for."""

    def __init__(self) -> None:
        self._of_file: dict[Path, Mapping[str, TensorLayout]] = {}

    def of(self, file: Path, name: str) -> TensorLayout:
        """Return the layout of tensor ``name`` as it is stored in ``file``."""
        if file not in self._of_file:
            with safe_open(file, framework="pt") as tensors:
                pieces = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 (it is no mapping)
                self._of_file[file] = {
                    name: (tuple(piece.get_shape()), str(piece.get_dtype())) for name, piece in pieces.items()
                }
        return self._of_file[file][name]
