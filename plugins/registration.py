"""Schemas and fake implementations in the torch.library namespace `kvforge`.

They live in Python, so that a graph can be exported on a machine without a compiler; the CPU kernels are
C++ (TORCH_LIBRARY_IMPL), so that a compiled package calls them without entering Python.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

from plugins.operator import NAMESPACE, Operator, P, R

_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def define(operator: Operator[P, R], fake: Callable[..., Any] | None = None) -> Operator[P, R]:
    """Declares an operator and returns it.

    `fake` gives empty results of the right shapes and dtypes. It gets all arguments by name, and is not needed where
    there are no results.
    """

    def by_name(*args: Any, **kwargs: Any) -> Any:
        return None if fake is None else fake(**operator.bind(*args, **kwargs))

    define_schema(operator.name, operator.schema, by_name)
    return operator


def define_schema(
    name: str, schema: str, fake: Callable[..., Any], implementation: Callable[..., Any] | None = None
) -> None:
    """Declares `kvforge::<name><schema>` and its fake implementation; with `implementation`, one that runs anywhere."""
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    if implementation is not None:
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
