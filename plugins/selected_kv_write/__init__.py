"""SelectedKvWrite: keys rebuilt from factors and values from host memory go to their places in the pools (ShadowKV)."""

from typing import Any

import torch
from torch import Tensor

from plugins.operator import Operator
from plugins.registration import define, define_schema, writes_are_functional
from plugins.selected_kv_write.reference import reference

OPERATOR = define(Operator(reference, version=2, writes=("k_pool", "v_pool")))

FUNCTIONAL = "selected_kv_write_functional"
"""The operator without effects, which graphs are traced from; nothing runs it."""


def _fake_functional(*given: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(given[-2]), torch.empty_like(given[-1])


_parameters = ", ".join(f"{'int' if a.name == 'chunk_size' else 'Tensor'} {a.name}" for a in OPERATOR.arguments)
define_schema(FUNCTIONAL, f"({_parameters}) -> (Tensor, Tensor)", _fake_functional)


def selected_kv_write(*args: Any, **named: Any) -> tuple[Tensor, ...]:
    """Brings chunks into the pools, in place, as `plugins.selected_kv_write.reference` defines it; returns the pools
    given (SSA style), and new ones under `plugins.registration.functional_writes`."""
    if writes_are_functional():
        return tuple(getattr(torch.ops.kvforge, FUNCTIONAL)(*args, **named))
    return OPERATOR.write(*args, **named)
