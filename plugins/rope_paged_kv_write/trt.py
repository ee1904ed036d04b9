"""TensorRT plugins RopePagedKvWrite and RopePagedKvWriteDynamic; the pools are updated in place."""

from collections.abc import Callable, Mapping

import torch

from plugins.rope_paged_kv_write import OPERATOR
from plugins.triton_kernel import KernelSpec
from plugins.trt_cache import EIGHT_BIT, FLOATS, POOLS, SCALES, STATIC_SCALES, cache_layout
from plugins.trt_plugin import Attributes, InPlace, Outputs, PluginDefinition, SymbolicTensor, Tensors


def _in_place(*names: str) -> Callable[[Mapping[str, SymbolicTensor], Attributes], Outputs]:
    return lambda inputs, attributes: tuple(map(InPlace, names))


def _types(
    caches: tuple[torch.dtype, ...], scales: tuple[torch.dtype, ...] = ()
) -> tuple[tuple[torch.dtype, ...], ...]:
    return tuple(
        (token, token, torch.float32, torch.float32, torch.int32, *(cache, cache, *scales) * 2)
        for token in FLOATS
        for cache in caches
    )


def _spec(tensors: Tensors, attributes: Attributes, capability: int) -> KernelSpec:
    from plugins.rope_paged_kv_write.cuda import kernel_spec

    return kernel_spec(cache_layout(tensors, attributes), tensors["k"].dtype)


PLUGINS = (
    PluginDefinition(
        name="RopePagedKvWrite",
        inputs=OPERATOR.tensors,
        outputs=_in_place(*POOLS),
        num_outputs=2,
        types=_types((*FLOATS, *EIGHT_BIT)),
        spec=_spec,
        attributes=STATIC_SCALES,
    ),
    PluginDefinition(
        name="RopePagedKvWriteDynamic",
        inputs=(*OPERATOR.tensors, *SCALES),
        outputs=_in_place(*POOLS, *SCALES),
        num_outputs=4,
        types=_types(EIGHT_BIT, (torch.float32, torch.float32)),
        spec=_spec,
    ),
)
