"""TensorRT plugin SelectedKvPlace: SelectedKvWrite behind LowRankKeyReconstruct; the pools are updated in place."""

from collections.abc import Mapping

import torch

from plugins.selected_kv_write.functional import PLACED
from plugins.triton_kernel import KernelSpec
from plugins.trt_cache import FLOATS, POOLS
from plugins.trt_plugin import Attributes, InPlace, Outputs, PluginDefinition, SymbolicTensor, Tensors


def _outputs(inputs: Mapping[str, SymbolicTensor], attributes: Attributes) -> Outputs:
    return tuple(map(InPlace, POOLS))


def _spec(tensors: Tensors, attributes: Attributes, capability: int) -> KernelSpec:
    from plugins.selected_kv_write.cuda_place import place_spec

    pool, places = tensors["k_pool"], tensors["chunks"].size(2)
    return place_spec(pool.dtype, pool.size(1), attributes["chunk_size"], places, pool.size(2), pool.size(3))


PLUGINS = (
    PluginDefinition(
        name="SelectedKvPlace",
        inputs=PLACED,
        outputs=_outputs,
        num_outputs=2,
        types=tuple((x, x, *(torch.int32,) * 5, x, x, x, x) for x in FLOATS),
        spec=_spec,
        attributes=(("chunk_size", int),),
    ),
)
