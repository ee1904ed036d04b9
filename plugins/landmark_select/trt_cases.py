"""Networks' inputs for the plugins of landmark_select."""

import torch

from plugins.landmark_select.cases import random_case
from plugins.trt_cache import FLOATS
from plugins.trt_case import PluginCase, network_tensor, new


def scores_case(seed: int, dtype: torch.dtype) -> PluginCase:
    arguments = random_case(seed, small=True, dtypes=(dtype,))
    q, landmarks, is_outlier, starts, table, counts, *_, scale, _ = arguments
    tensors = (q, landmarks, is_outlier.to(torch.int8), starts, table, counts)
    inputs = tuple(network_tensor(x, (0, 1) if x is table else (0,)) for x in tensors)
    outputs, aliases = new((torch.float32, (len(counts), q.shape[1], table.shape[1] * landmarks.shape[1])))
    return PluginCase("LandmarkSelectScores", inputs, {"scale": scale}, outputs, aliases)


def choose_case(seed: int) -> PluginCase:
    q, landmarks, *_, table, counts, selected, _, most = random_case(seed, small=True)
    scores = torch.empty(len(counts), q.shape[1], table.shape[1] * landmarks.shape[1])
    kv_heads = landmarks.shape[2]
    outputs, aliases = new((torch.int32, (len(counts), kv_heads, most)))
    inputs = (network_tensor(scores, (0, 2)), network_tensor(counts), network_tensor(selected))
    return PluginCase("LandmarkSelectChoose", inputs, {"kv_heads": kv_heads, "max_selected": most}, outputs, aliases)


def plugin_cases() -> list[PluginCase]:
    """Every plugin with the dtypes that it takes."""
    return [
        *(scores_case(seed, dtype) for seed, dtype in zip((1, 2, 4), FLOATS, strict=True)),
        *(choose_case(seed) for seed in (1, 2)),
    ]
