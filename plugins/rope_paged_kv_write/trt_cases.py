"""Networks' inputs for the plugins of rope_paged_kv_write."""

import torch

from plugins.cases import CacheFormat
from plugins.rope_paged_kv_write.cases import random_case
from plugins.trt_case import PluginCase, cached, network_tensor


def write_case(seed: int, cache: CacheFormat, dtype: torch.dtype) -> PluginCase:
    arguments = random_case(seed, small=True, dtypes=(dtype,), formats=(cache,))
    tensors = [network_tensor(x) for x in arguments[:9] if isinstance(x, torch.Tensor)]
    pools = tensors[5:]
    return PluginCase(
        "RopePagedKvWriteDynamic" if cache.dynamic else "RopePagedKvWrite",
        tuple(tensors),
        {} if cache.dynamic else {"k_scale": arguments[9], "v_scale": arguments[10]},
        [(pool.dtype, tuple(pool.shape)) for pool in pools],
        {index: 5 + index for index in range(len(pools))},
    )


def plugin_cases() -> list[PluginCase]:
    """Every plugin with the dtypes that it takes."""
    return cached(write_case)
