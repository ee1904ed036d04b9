"""Exporting a module by tracing it."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import config

_SETTING = "do_not_emit_stack_traces"
"""Of torch 2.13; others pass over it."""
_ONE = threading.RLock()


def trace(module: nn.Module, arguments: tuple[Any, ...], dynamic_shapes: Any) -> ExportedProgram:
    """Return the graph of what ``module`` computes of ``arguments``, which are examples.

    Args:
        dynamic_shapes: as ``torch.export.export`` takes them.
    """
    with without_lines():
        return torch.export.export(module, arguments, dynamic_shapes=dynamic_shapes, strict=False)


@contextlib.contextmanager
def without_lines() -> Iterator[None]:
    """Nodes of graphs do not say which line of Python they come from: to find that out takes a seventh of a trace.

    One thread at a time is inside: what it changes is the process's, and is put back as it was."""
    with _ONE:
        before = getattr(config, _SETTING, False)
        setattr(config, _SETTING, True)
        try:
            yield
        finally:
            setattr(config, _SETTING, before)
