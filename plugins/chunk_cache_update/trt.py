"""TensorRT plugin ChunkCacheUpdate; what is in which place, and the counts, are updated in place."""

from collections.abc import Mapping

import torch

from plugins.chunk_cache_update import OPERATOR
from plugins.triton_kernel import KernelSpec
from plugins.trt_plugin import Attributes, InPlace, Outputs, PluginDefinition, SymbolicTensor, Tensors


def _outputs(inputs: Mapping[str, SymbolicTensor], attributes: Attributes) -> Outputs:
    missed = SymbolicTensor(torch.int32, inputs["selected"].shape)
    return missed, missed, InPlace("cached"), InPlace("counts")


def _spec(tensors: Tensors, attributes: Attributes, capability: int) -> KernelSpec:
    from plugins.chunk_cache_update.cuda import kernel_spec

    return kernel_spec(tensors["selected"].size(1), tensors["selected"].size(2))


_I32, _I64 = torch.int32, torch.int64

PLUGINS = (
    PluginDefinition(
        name="ChunkCacheUpdate",
        inputs=OPERATOR.tensors,
        outputs=_outputs,
        num_outputs=4,
        types=((_I32, _I32, _I64, _I32, _I32, _I32, _I32, _I64),),
        spec=_spec,
    ),
)
