"""ShortConv: the causal convolution over the last few tokens of a sequence, channel by channel, and SiLU behind it."""

from typing import Any

import torch
from torch import Tensor

from plugins.operator import Operator, Variants
from plugins.registration import define
from plugins.short_conv.reference import reference


def _fake(x: Tensor, **_: Any) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


OPERATOR = define(
    Operator(
        reference,
        version=3,
        writes=("conv_pool",),
        graphs=("lower", "upper"),
        # No contraction: the sums of a channel are then the same wherever its tokens stand.
        variants={"cpu_kernel.cpp": Variants(flags=("-ffp-contract=off",))},
    ),
    _fake,
)
short_conv = OPERATOR.call
