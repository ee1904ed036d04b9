"""Mamba2Scan: the selective state space of Mamba-2, a state that forgets, and takes tokens up by their steps."""

from typing import Any

from torch import Tensor

from plugins.mamba2_scan.reference import reference
from plugins.operator import Operator, Variants
from plugins.registration import define


def _fake(xbc: Tensor, state_pool: Tensor, has_queries: bool, **_: Any) -> Tensor:
    return xbc.new_empty((xbc.shape[0] if has_queries else 0, state_pool.shape[1], state_pool.shape[3]))


OPERATOR = define(
    Operator(
        reference,
        version=2,
        writes=("state_pool",),
        graphs=("lower", "upper"),
        # Multiply-adds are where the source has them: a state is then the same wherever a step ends.
        variants={"cpu_kernel.cpp": Variants(flags=("-ffp-contract=off",))},
    ),
    _fake,
)
mamba2_scan = OPERATOR.call
