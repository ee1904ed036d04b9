"""The definition of PackedLinear in plain torch."""

import torch
from torch import Tensor
from torch.nn import functional as F

from plugins.kv_quantization import dynamic_scale, quantize
from plugins.packed_linear.packing import PANEL, unpack


def reference(
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    norm: Tensor | None,
    residual: Tensor | None,
    out_features: int,
    eps: float,
    gated: bool,
    float32_out: bool,
) -> Tensor:
    """Same arguments and result as `torch.ops.kvforge.packed_linear`."""
    depth, num_outputs = x.shape[1], out_features * (2 if gated else 1)
    if norm is not None:
        wide = x.float()
        x = norm * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    rows = unpack(weight, num_outputs, depth, gated)
    if scales is None:
        y = x.float() @ rows.float().T
    else:
        x_scale = dynamic_scale(x, torch.int8)[:, None]
        sums = quantize(x, x_scale, torch.int8).double() @ rows.double().T  # exact
        w_scale = unpack(scales[0].view(-1, 1, PANEL, 1), num_outputs, 1, gated)[:, 0]
        y = sums.float() * x_scale * w_scale
    if bias is not None:
        y = y + bias.float()
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    if residual is not None:
        y = y + residual.float()
    return y if float32_out else y.to(torch.bfloat16)
