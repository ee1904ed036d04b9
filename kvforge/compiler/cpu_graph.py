"""Graphs for the CPU: linear layers on packed weights, with norm, gate and residual in one operator."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from model_defs import ModelConfig
from model_defs.graphs import EarlyExitGraph, LowerGraph, UpperGraph
from model_defs.layers import Linear, RMSNorm
from plugins.packed_linear import pack, packed_linear
from plugins.packed_linear.int4 import Codes
from plugins.packed_linear.packing import pack_codes


class PackedLinear(nn.Module):
    """What a ``Linear`` computes, by ``plugins.packed_linear``. ``packed``, and for int8 and int4 ``scales``, take the
    place of ``weight``, under names of their own: a tied head leaves the table of embeddings as it is."""

    def __init__(self, linear: Linear, weight_dtype: torch.dtype) -> None:
        super().__init__()
        self.out_features = linear.out_features // (2 if linear.gated else 1)
        self.gated, self.float32_out = linear.gated, linear.float32_out
        for name, tensor in packed_tensors(
            torch.empty_like(linear.weight, device="meta"), linear, weight_dtype
        ).items():
            self.register_buffer(name, torch.empty_like(tensor, device="cpu"))
        self.register_parameter("bias", linear.bias)

    def forward(self, x: Tensor, norm: RMSNorm | None = None, residual: Tensor | None = None) -> Tensor:
        """Return ``[T, out_features]``; arguments as ``Linear``'s."""
        return packed_linear(
            x,
            self.packed,
            self.out_features,
            scales=self._buffers.get("scales"),
            bias=self.bias,
            norm=None if norm is None else norm.weight,
            eps=0.0 if norm is None else norm.eps,
            residual=residual,
            gated=self.gated,
            float32_out=self.float32_out,
        )


def packed_tensors(weight: Tensor | Codes, linear: Linear, weight_dtype: torch.dtype) -> dict[str, Tensor]:
    """Return ``weight`` ``[N, K]``, or its codes in 4 bits, as the tensors that ``linear`` has once it is packed."""
    is_packed = isinstance(weight, Codes)
    packed, scales = pack_codes(weight, linear.gated) if is_packed else pack(weight, weight_dtype, linear.gated)
    return {"packed": packed} if scales is None else {"packed": packed, "scales": scales}


def pack_linears(module: nn.Module, weight_dtype: torch.dtype) -> None:
    """Put a ``PackedLinear``, uninitialised, in the place of every ``Linear`` below ``module``."""
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if isinstance(child, Linear):
                setattr(parent, name, PackedLinear(child, weight_dtype))


def linears(config: ModelConfig) -> Mapping[str, Linear]:
    """Return every linear layer of the graphs by name, without storage."""
    with torch.device("meta"):
        graphs: list[nn.Module] = [
            LowerGraph(config),
            UpperGraph(config),
            *([EarlyExitGraph(config)] if config.early_exit else []),
        ]
    return {name: layer for graph in graphs for name, layer in graph.named_modules() if isinstance(layer, Linear)}
