"""The definition of ExpertLinear in plain torch."""

import torch
from torch import Tensor
from torch.nn import functional as F

from plugins.packed_linear.reference import reference as packed_linear


def reference(
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None,
    expert_ids: Tensor,
    out_features: int,
    gated: bool,
    float32_out: bool,
) -> Tensor:
    """Same arguments and result as `torch.ops.kvforge.expert_linear`."""
    rows = x if x.dim() == 3 else x[:, None].expand(*expert_ids.shape, x.shape[1])
    y = torch.empty((*expert_ids.shape, out_features), dtype=torch.float32 if float32_out else x.dtype)
    for expert in expert_ids.unique().tolist():
        chosen = expert_ids == expert
        if weight.dim() == 3:
            part = F.linear(rows[chosen], weight[expert])
            part = F.silu(part[:, :out_features]) * part[:, out_features:] if gated else part
        else:
            own = None if scales is None else scales[expert]
            part = packed_linear(
                rows[chosen], weight[expert], own, None, None, None, out_features, 0.0, gated, float32_out
            )
        y[chosen] = part.to(y.dtype)
    return y
