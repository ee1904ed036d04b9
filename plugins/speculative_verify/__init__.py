"""SpeculativeVerify: which drafts the target model accepts, and the token that follows them."""

from typing import Any

import torch
from torch import Tensor

from plugins.operator import Operator, Variants
from plugins.registration import define
from plugins.speculative_verify.reference import reference


def _fake(temperature: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    shape = temperature.shape
    return temperature.new_empty(shape, dtype=torch.int32), temperature.new_empty(shape, dtype=torch.int32)


OPERATOR = define(Operator(reference, version=1, graphs=("verify",), variants={"cpu_kernel.cpp": Variants()}), _fake)
speculative_verify = OPERATOR.call
