"""Graphs for the CPU: linear layers on packed weights, with norm, gate and residual in one operator."""

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor, nn

from kvforge.compiler.options import PACKED_HEADS
from model_defs import ModelConfig
from model_defs.draft_head import DraftHead
from model_defs.graphs import EarlyExitGraph, LowerGraph, UpperGraph
from model_defs.head_kinds import HEAD_CODE
from model_defs.layers import ExpertLinear, Linear, RMSNorm
from model_defs.predict_graph import PredictGraph
from model_defs.prediction import Prediction
from plugins.expert_linear import expert_linear
from plugins.packed_linear import pack, packed_linear, rotated_rows
from plugins.packed_linear.int4 import Codes
from plugins.packed_linear.int4_steps import SteppedCodes
from plugins.packed_linear.int8 import ByteCodes
from plugins.packed_linear.packing import pack_codes


class PackedLinear(nn.Module):
    """What a ``Linear`` computes, by ``plugins.packed_linear``. ``packed``, and for int8 and int4 ``scales``, take the
    place of ``weight``, under names of their own: a tied head leaves the table of embeddings as it is."""

    def __init__(self, linear: Linear, weight_dtype: torch.dtype) -> None:
        super().__init__()
        self.out_features = linear.out_features // (2 if linear.gated else 1)
        self.gated, self.float32_out = linear.gated, linear.float32_out
        self.rotated = is_rotated(linear, weight_dtype)
        _register_packed(self, linear, weight_dtype)
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
            rotated=self.rotated,
        )


class PackedExpertLinear(nn.Module):
    """What an ``ExpertLinear`` computes, with packed weights."""

    def __init__(self, linear: ExpertLinear, weight_dtype: torch.dtype) -> None:
        super().__init__()
        self.out_features, self.gated = linear.out_features, linear.gated
        _register_packed(self, linear, weight_dtype)

    def forward(self, x: Tensor, expert_ids: Tensor, float32_out: bool = False) -> Tensor:
        """Return ``[T, k, out_features]``; arguments as ``ExpertLinear``'s."""
        scales = self._buffers.get("scales")
        options = {"scales": scales, "gated": self.gated, "float32_out": float32_out}
        return expert_linear(x, self.packed, expert_ids, self.out_features, **options)


AnyLinear = Linear | ExpertLinear


def _register_packed(module: nn.Module, linear: AnyLinear, weight_dtype: torch.dtype) -> None:
    """Give ``module`` the packed tensors of ``linear``, uninitialised."""
    for name, tensor in packed_tensors(torch.empty_like(linear.weight, device="meta"), linear, weight_dtype).items():
        module.register_buffer(name, torch.empty_like(tensor, device="cpu"))


def dtype_of_packed(linear: AnyLinear, weight_dtype: torch.dtype) -> torch.dtype:
    """Return what the weights of ``linear`` are packed as in an engine whose linear layers are ``weight_dtype``."""
    if isinstance(linear, ExpertLinear):
        return weight_dtype
    if linear.is_head:
        return PACKED_HEADS.get(weight_dtype, weight_dtype)
    return weight_dtype if linear.quantizes else torch.bfloat16


def is_rotated(linear: AnyLinear, weight_dtype: torch.dtype) -> bool:
    """Whether inputs and weights of ``linear`` are rotated, which spreads outliers of the inputs before they become
    int8; packed in 4 bits weights lose more by it than inputs gain."""
    return isinstance(linear, Linear) and linear.has_outliers and dtype_of_packed(linear, weight_dtype) == torch.int8


def packed_tensors(
    weight: Tensor | Codes | SteppedCodes | ByteCodes, linear: AnyLinear, weight_dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return ``weight`` ``[N, K]``, or its codes in 4 or 8 bits, as the tensors that ``linear`` has once it is packed;
    those of experts ``[E, N, K]`` stacked. Codes are of a rotated weight where it is to be."""
    rotated, weight_dtype = is_rotated(linear, weight_dtype), dtype_of_packed(linear, weight_dtype)
    if isinstance(weight, Tensor) and weight.dim() == 3:
        return stack_packed((packed_tensors(one, linear, weight_dtype) for one in weight), len(weight))
    if isinstance(weight, Tensor):
        packed, scales = pack(rotated_rows(weight) if rotated else weight, weight_dtype, linear.gated)
    else:
        packed, scales = pack_codes(weight, linear.gated)
    return {"packed": packed} if scales is None else {"packed": packed, "scales": scales}


def stack_packed(parts: Iterable[dict[str, Tensor]], count: int) -> dict[str, Tensor]:
    """Return the packed tensors of ``count`` experts as one of each kind; one expert's are in memory beside these."""
    stacked: dict[str, Tensor] = {}
    for index, part in enumerate(parts):
        for name, tensor in part.items():
            if name not in stacked:
                stacked[name] = tensor.new_empty((count, *tensor.shape))
            stacked[name][index] = tensor
    return stacked


def pack_linears(module: nn.Module, weight_dtype: torch.dtype, int8_layers: Collection[str] = ()) -> None:
    """Put a packed module, uninitialised, in the place of every ``Linear`` and ``ExpertLinear`` below ``module``; of
    those whose names are in ``int8_layers`` with int8 weights."""
    for name, layer in _linears(module):
        packed = PackedLinear if isinstance(layer, Linear) else PackedExpertLinear
        parent, _, own = name.rpartition(".")
        dtype = torch.int8 if name in int8_layers else weight_dtype
        setattr(module.get_submodule(parent), own, packed(layer, dtype))


def linears(config: ModelConfig) -> Mapping[str, AnyLinear]:
    """Return every linear layer of the graphs by name, without storage."""
    with torch.device("meta"):
        graphs: list[nn.Module] = [
            LowerGraph(config),
            UpperGraph(config),
            *([EarlyExitGraph(config)] if config.early_exit else []),
        ]
    return {name: layer for graph in graphs for name, layer in _linears(graph)}


def predict_linears(prediction: Prediction) -> Mapping[str, AnyLinear]:
    """Return every linear layer of the graph ``predict`` by name, without storage."""
    with torch.device("meta"):
        return dict(_linears(PredictGraph(prediction)))


def draft_linears(config: ModelConfig, head: DraftHead) -> Mapping[str, AnyLinear]:
    """Return every linear layer of a draft head by name, without storage."""
    code = HEAD_CODE[head.kind]
    with torch.device("meta"):
        parts = {"draft": code.states(config, head), "": code.graph(config, head)}
    return {f"{part}.{name}".lstrip("."): layer for part, graph in parts.items() for name, layer in _linears(graph)}


def _linears(graph: nn.Module) -> list[tuple[str, AnyLinear]]:
    return [(name, layer) for name, layer in graph.named_modules() if isinstance(layer, AnyLinear)]
