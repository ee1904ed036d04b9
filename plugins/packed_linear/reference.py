"""The definition of PackedLinear in plain torch."""

import torch
from torch import Tensor
from torch.nn import functional as F

from plugins.kv_quantization import dynamic_scale, quantize
from plugins.packed_linear.int4 import MIDDLE, Codes
from plugins.packed_linear.packing import PANEL, is_in_steps, rotated_rows, unpack, unpack_codes


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
    rotated: bool = False,
) -> Tensor:
    """Same arguments and result as `torch.ops.kvforge.packed_linear`."""
    depth, num_outputs = x.shape[1], out_features * (2 if gated else 1)
    if norm is not None:
        wide = x.float()
        x = norm * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    if scales is None:
        y = x.float() @ unpack(weight, num_outputs, depth, gated).float().T
    else:
        x = rotated_rows(x).to(x.dtype) if rotated else x
        x_scale = dynamic_scale(x, torch.int8)[:, None]
        values = quantize(x, x_scale, torch.int8).double()
        codes = unpack_codes(weight, num_outputs, depth, gated) if weight.dtype == torch.uint8 else None
        if codes is not None and not is_in_steps(weight):
            sums = _sums_of_groups(values, codes)
        else:
            integers = unpack(weight, num_outputs, depth, gated) if codes is None else codes.dequantize()
            sums = (values @ integers.double().T).float()  # exact before it is rounded
        y = sums * x_scale * unpack(scales[0].view(-1, 1, PANEL, 1), num_outputs, 1, gated)[:, 0]
    if bias is not None:
        y = y + bias.float()
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    if residual is not None:
        y = y + residual.float()
    return y if float32_out else y.to(torch.bfloat16)


def _sums_of_groups(values: Tensor, weight: Codes) -> Tensor:
    """The exact sum of each group, rounded, times its scale, rounded; added up in float32 from the first group on."""
    sums = torch.zeros(len(values), len(weight.codes))
    for g, columns in enumerate(range(0, values.shape[1], weight.group_depth)):
        group = slice(columns, columns + weight.group_depth)
        zeros = MIDDLE if weight.zeros is None else weight.zeros[:, g, None].double()
        products = values[:, group] @ (weight.codes[:, group].double() - zeros).T
        sums = sums + products.float() * weight.scales[:, g]
    return sums
