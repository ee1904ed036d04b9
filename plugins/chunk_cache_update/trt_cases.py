"""Networks' inputs for the plugin of chunk_cache_update."""

from plugins.chunk_cache_update.cases import random_case
from plugins.trt_case import PluginCase, network_tensor


def update_case(seed: int) -> PluginCase:
    tensors = random_case(seed, small=True)
    selected, cached, counts = tensors[:3]
    outputs = [(one.dtype, tuple(one.shape)) for one in (selected, selected, cached, counts)]
    return PluginCase("ChunkCacheUpdate", tuple(map(network_tensor, tensors)), {}, outputs, {0: -1, 1: -1, 2: 1, 3: 2})


def plugin_cases() -> list[PluginCase]:
    """Of some sizes."""
    cases = (update_case(seed) for seed in range(20))
    return [case for case in cases if case.inputs[0].shape[2] > 0][:3]
