"""ExpertLinear: a linear layer of each of several experts, on the rows of the tokens that go to it."""

from typing import Any

import torch
from torch import Tensor

from plugins.expert_linear.packing import pack_experts
from plugins.expert_linear.reference import reference
from plugins.operator import Operator
from plugins.registration import define

__all__ = ["OPERATOR", "expert_linear", "pack_experts", "reference"]


def _fake(x: Tensor, expert_ids: Tensor, out_features: int, float32_out: bool, **_: Any) -> Tensor:
    return x.new_empty((*expert_ids.shape, out_features), dtype=torch.float32 if float32_out else x.dtype)


OPERATOR = define(Operator(reference, version=2, graphs=("lower", "upper")), _fake)


def expert_linear(
    x: Tensor,
    weight: Tensor,
    expert_ids: Tensor,
    out_features: int,
    *,
    scales: Tensor | None = None,
    gated: bool = False,
    float32_out: bool = False,
) -> Tensor:
    """Linear layers y = x W_e^T of E experts, each on the rows that go to it: [T, k, out_features].

    expert_ids: [T, k] int32, the experts of each token. x: [T, K], the row of a token for all its experts, or
    [T, k, K], a row for each; K contiguous. gated: the rows of W_e are [gate; up], the result is silu(gate) * up and
    out_features the number of up rows. The result has x's dtype, or float32 with float32_out.

    weight: [E, N, K] of x's dtype, float32 or bfloat16, or packed by `pack_experts` with its scales, which takes
    bfloat16 x. Packed weights are multiplied as PackedLinear's: a row of the result then depends, in all its bits, on
    its own row of x and its own expert alone.
    Raises RuntimeError on a wrong shape, dtype or stride, and on an expert that is not there.
    """
    return OPERATOR.call(x, weight, scales, expert_ids, out_features, gated, float32_out)
