"""TensorRT plugin LowRankKeyReconstruct."""

from collections.abc import Mapping

import torch

from plugins.low_rank_key_reconstruct import OPERATOR
from plugins.triton_kernel import KernelSpec
from plugins.trt_cache import FLOATS
from plugins.trt_plugin import Attributes, Outputs, PluginDefinition, SymbolicTensor, Tensors


def _keys(inputs: Mapping[str, SymbolicTensor], attributes: Attributes) -> Outputs:
    sv = inputs["sv"].shape
    return (SymbolicTensor(inputs["u"].dtype, (inputs["rows"].shape[0], sv[1], sv[3])),)


def _spec(tensors: Tensors, attributes: Attributes, capability: int) -> KernelSpec:
    from plugins.low_rank_key_reconstruct.cuda import kernel_spec

    sv = tensors["sv"]
    return kernel_spec(tensors["u"].dtype, sv.size(1), sv.size(2), sv.size(3))


PLUGINS = (
    PluginDefinition(
        name="LowRankKeyReconstruct",
        inputs=OPERATOR.tensors,
        outputs=_keys,
        num_outputs=1,
        types=tuple((x, x, *(torch.int32,) * 3, *(torch.float32,) * 2, x) for x in FLOATS),
        spec=_spec,
    ),
)
