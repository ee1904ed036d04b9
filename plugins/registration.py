"""Schemas and fake implementations in the torch.library namespace `kvforge`.

They live in Python, so that a graph can be exported on a machine without a compiler; the CPU kernels are
C++ (TORCH_LIBRARY_IMPL), so that a compiled package calls them without entering Python.
"""

from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "kvforge"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def define(name: str, schema: str, fake: Callable[..., Any]) -> None:
    """Declares `kvforge::<name><schema>` and its fake (shape-only) implementation."""
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
