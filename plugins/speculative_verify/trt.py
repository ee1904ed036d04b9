"""TensorRT plugin SpeculativeVerify."""

from collections.abc import Mapping
from typing import Any

import torch

from plugins.speculative_verify import OPERATOR
from plugins.triton_kernel import KernelSpec
from plugins.trt_plugin import Attributes, PluginDefinition, Tensors


def _tokens(inputs: Mapping[str, Any], attributes: Attributes) -> tuple[Any, ...]:
    import tensorrt as trt
    import tensorrt.plugin as trtp

    shape = (inputs["temperature"].shape_expr[0],)
    return tuple(trtp.from_shape_expr(shape, trt.DataType.INT32) for _ in ("accepted", "next_token"))


def _spec(tensors: Tensors, attributes: Attributes, capability: int) -> KernelSpec:
    from plugins.speculative_verify.cuda import kernel_spec

    return kernel_spec(tensors["logits"].size(1))


_F32, _I32 = torch.float32, torch.int32

PLUGINS = (
    PluginDefinition(
        name="SpeculativeVerify",
        inputs=OPERATOR.tensors,
        outputs=_tokens,
        num_outputs=2,
        types=((_F32, _I32, _I32, _F32, _F32, _F32, _I32, _I32),),
        spec=_spec,
    ),
)
