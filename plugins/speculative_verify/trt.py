"""TensorRT plugin SpeculativeVerify."""

from collections.abc import Mapping

import torch

from plugins.speculative_verify import OPERATOR
from plugins.triton_kernel import KernelSpec
from plugins.trt_plugin import Attributes, Outputs, PluginDefinition, SymbolicTensor, Tensors


def _tokens(inputs: Mapping[str, SymbolicTensor], attributes: Attributes) -> Outputs:
    one_each = SymbolicTensor(torch.int32, (inputs["temperature"].shape[0],))
    return one_each, one_each


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
