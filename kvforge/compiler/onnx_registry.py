"""The table of what makes ONNX of each operator of torch, filled once for all graphs of a process."""

import contextlib
import copy
import functools
from collections.abc import Iterator
from typing import Any

from torch.onnx._internal.exporter._constants import TORCHLIB_OPSET
from torch.onnx._internal.exporter._registration import ONNXRegistry

_FILL: Any = vars(ONNXRegistry)["from_torchlib"]


@contextlib.contextmanager
def registry_kept() -> Iterator[None]:
    """Inside, ``torch.onnx.export`` gets copies of one table. By itself it reads the sources of 500 functions for each
    graph, which is a fifth of a small one's export."""
    ONNXRegistry.from_torchlib = staticmethod(_copy)
    try:
        yield
    finally:
        ONNXRegistry.from_torchlib = _FILL


def _copy(opset_version: int = TORCHLIB_OPSET) -> ONNXRegistry:
    copied = copy.copy(_filled(opset_version))
    copied.functions = {operator: list(makers) for operator, makers in copied.functions.items()}
    return copied


@functools.cache
def _filled(opset_version: int) -> ONNXRegistry:
    return _FILL.__get__(None, ONNXRegistry)(opset_version=opset_version)
