"""Networks' inputs for the plugin of low_rank_key_reconstruct."""

import torch

from plugins.low_rank_key_reconstruct import OPERATOR
from plugins.low_rank_key_reconstruct.cases import random_case
from plugins.trt_cache import FLOATS
from plugins.trt_case import PluginCase, network_tensor, new

_DYNAMIC = {"shadow_table": (0, 1), "cos": (), "sin": ()}


def reconstruct_case(seed: int, dtype: torch.dtype) -> PluginCase:
    """Lists of a random case."""
    given = OPERATOR.bind(*random_case(seed, small=True, dtypes=(dtype,)))
    chunks, size = given["chunks"], given["chunk_size"]
    inputs = tuple(network_tensor(given[name], _DYNAMIC.get(name, (0,))) for name in OPERATOR.tensors)
    outputs, aliases = new((dtype, (*chunks.shape[:2], chunks.shape[2] * size, given["sv"].shape[3])))
    return PluginCase("LowRankKeyReconstruct", inputs, {"chunk_size": size}, outputs, aliases)


def plugin_cases() -> list[PluginCase]:
    """With each dtype, of lists that may hold something."""
    found = []
    for dtype in FLOATS:
        cases = (reconstruct_case(seed, dtype) for seed in range(20))
        found.append(next(case for case in cases if case.inputs[3].shape[2] > 0))
    return found
