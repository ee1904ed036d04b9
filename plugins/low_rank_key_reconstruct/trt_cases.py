"""Networks' inputs for the plugins of low_rank_key_reconstruct."""

import torch

from plugins.low_rank_key_reconstruct.cases import random_case
from plugins.trt_cache import FLOATS
from plugins.trt_case import PluginCase, network_tensor, new


def reconstruct_case(seed: int, dtype: torch.dtype) -> PluginCase:
    arguments = random_case(seed, small=True, dtypes=(dtype,))
    rows, sv = arguments[3], arguments[1]
    outputs, aliases = new((dtype, (*rows.shape, sv.shape[3])))
    return PluginCase("LowRankKeyReconstruct", tuple(map(network_tensor, arguments)), {}, outputs, aliases)


def plugin_cases() -> list[PluginCase]:
    """Every plugin with the dtypes that it takes."""
    return [reconstruct_case(seed, dtype) for seed, dtype in enumerate(FLOATS)]
