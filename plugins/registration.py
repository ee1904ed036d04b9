"""Schemas and fake implementations in the torch.library namespace `kvforge`.

They live in Python, so that a graph can be exported on a machine without a compiler; the CPU kernels are
C++ (TORCH_LIBRARY_IMPL), so that a compiled package calls them without entering Python.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

NAMESPACE = "kvforge"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def define(name: str, schema: str, fake: Callable[..., Any]) -> None:
    """Declares `kvforge::<name><schema>` and its fake (shape-only) implementation."""
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)


def define_functional(name: str, schema: str, fake: Callable[..., Any], implementation: Callable[..., Any]) -> None:
    """Declares an operator that returns new tensors where another writes in place; runs anywhere, by copies."""
    define(name, schema, fake)
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")


_functional: ContextVar[bool] = ContextVar("functional", default=False)


@contextlib.contextmanager
def functional_writes() -> Iterator[None]:
    """Within it, operators that write in place call their functional twins: what a graph without effects, such as an
    ONNX one, is traced from."""
    token = _functional.set(True)
    try:
        yield
    finally:
        _functional.reset(token)


def writes_are_functional() -> bool:
    """Whether `functional_writes` is on."""
    return _functional.get()
