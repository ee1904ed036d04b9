"""TensorRT plugin LowRankKeyReconstruct."""

from collections.abc import Mapping

import torch

from plugins.low_rank_key_reconstruct import OPERATOR
from plugins.triton_kernel import KernelSpec
from plugins.trt_cache import FLOATS
from plugins.trt_plugin import Attributes, Outputs, PluginDefinition, SymbolicTensor, Tensors


def _keys(inputs: Mapping[str, SymbolicTensor], attributes: Attributes) -> Outputs:
    sequences, kv_heads, places = inputs["chunks"].shape[:3]
    shape = (sequences, kv_heads, places * attributes["chunk_size"], inputs["sv"].shape[3])
    return (SymbolicTensor(inputs["u"].dtype, shape),)


def _spec(tensors: Tensors, attributes: Attributes, capability: int) -> KernelSpec:
    from plugins.low_rank_key_reconstruct.cuda import kernel_spec

    u, sv = tensors["u"], tensors["sv"]
    places = tensors["chunks"].size(2)
    return kernel_spec(u.dtype, u.size(1), attributes["chunk_size"], places, sv.size(1), sv.size(2), sv.size(3))


PLUGINS = (
    PluginDefinition(
        name="LowRankKeyReconstruct",
        inputs=OPERATOR.tensors,
        outputs=_keys,
        num_outputs=1,
        types=tuple((x, x, *(torch.int32,) * 3, *(torch.float32,) * 2, x) for x in FLOATS),
        spec=_spec,
        attributes=OPERATOR.attributes,
    ),
)
