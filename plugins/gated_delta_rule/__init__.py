"""GatedDeltaRule: linear attention whose state forgets, and takes up what it does not know yet (Gated DeltaNet)."""

from typing import Any

from torch import Tensor

from plugins.gated_delta_rule.reference import reference
from plugins.operator import Operator, Variants
from plugins.registration import define


def _fake(qkv: Tensor, state_pool: Tensor, has_queries: bool, **_: Any) -> Tensor:
    return qkv.new_empty((qkv.shape[0] if has_queries else 0, state_pool.shape[1], state_pool.shape[3]))


OPERATOR = define(
    Operator(
        reference,
        version=3,
        writes=("state_pool",),
        graphs=("lower", "upper"),
        # Multiply-adds are where the source has them: a state is then the same wherever a step ends.
        variants={"cpu_kernel.cpp": Variants(flags=("-ffp-contract=off",))},
    ),
    _fake,
)
gated_delta_rule = OPERATOR.call
