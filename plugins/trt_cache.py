"""What the plugins on a KV cache have in common."""

import torch

from plugins.triton_cache import PoolLayout
from plugins.trt_plugin import Attributes, Tensors

POOLS = ("k_pool", "v_pool")
SCALES = ("k_scales", "v_scales")
STATIC_SCALES = (("k_scale", float), ("v_scale", float))
"""Attributes of the plugins whose cache has one scale for all of K and one for all of V, or none."""

EIGHT_BIT = (torch.float8_e4m3fn, torch.int8)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def cache_layout(tensors: Tensors, attributes: Attributes) -> PoolLayout:
    """The layout of a plugin's contiguous pools."""
    pool = tensors["k_pool"]
    return PoolLayout(
        pool.dtype,
        page_size=pool.size(1),
        kv_heads=pool.size(2),
        head_dim=pool.size(3),
        dynamic="k_scales" in tensors,
        k_scale=attributes.get("k_scale", 1.0),
        v_scale=attributes.get("v_scale", 1.0),
    )
