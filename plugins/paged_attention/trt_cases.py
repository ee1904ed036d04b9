"""Networks' inputs for the plugins of paged_attention."""

import functools

import torch

from plugins.cases import CacheFormat
from plugins.paged_attention.cases import random_case
from plugins.trt_case import Dynamic, NetworkTensor, PluginCase, cached, network_tensor, new

NUM_SPLITS = 16


def attention_case(seed: int, cache: CacheFormat, dtype: torch.dtype, part: str = "") -> PluginCase:
    arguments = random_case(seed, small=True, dtypes=(dtype,), formats=(cache,))
    q, _, _, _, kv_length, page_table = arguments[:6]
    tensors = [network_tensor(x) for x in (*arguments[:5],)] + [network_tensor(page_table, (0, 1))]
    tensors += [network_tensor(x) for x in arguments[8:10] if x is not None]
    attributes = {"scale": arguments[6], "window": arguments[7]}
    if not cache.dynamic:
        attributes |= {"k_scale": arguments[10], "v_scale": arguments[11]}
    partial = (*kv_length.shape, q.shape[1], NUM_SPLITS, q.shape[2] + 2)
    if part:
        attributes["num_splits"] = NUM_SPLITS
    if part == "Combine":
        tensors.append(NetworkTensor(torch.float32, (Dynamic(partial[0]), *partial[1:])))
    outputs, aliases = new((torch.float32, partial) if part == "Partial" else (q.dtype, tuple(q.shape)))
    name = f"PagedAttention{part}{'Dynamic' if cache.dynamic else ''}"
    return PluginCase(name, tuple(tensors), attributes, outputs, aliases)


def plugin_cases() -> list[PluginCase]:
    """Every plugin with the dtypes that it takes."""
    return [
        case for part in ("", "Partial", "Combine") for case in cached(functools.partial(attention_case, part=part))
    ]
