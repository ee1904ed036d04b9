"""SelectedKvWrite: keys rebuilt from factors and values from host memory go to their places in the pools (ShadowKV)."""

from typing import Any

from torch import Tensor

from plugins.operator import Operator
from plugins.registration import define, writes_are_functional
from plugins.selected_kv_write import functional
from plugins.selected_kv_write.reference import reference

OPERATOR = define(Operator(reference, version=2, writes=("k_pool", "v_pool")))


def selected_kv_write(*args: Any, **named: Any) -> tuple[Tensor, ...]:
    """Brings chunks into the pools, in place, as `plugins.selected_kv_write.reference` defines it; returns the pools
    given (SSA style), and new ones under `plugins.registration.functional_writes`."""
    if writes_are_functional():
        return functional.write(OPERATOR.bind(*args, **named))
    return OPERATOR.write(*args, **named)
