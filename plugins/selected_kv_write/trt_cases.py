"""Networks' inputs for the plugin of selected_kv_write."""

import torch

from plugins.selected_kv_write import OPERATOR
from plugins.selected_kv_write.cases import random_case
from plugins.selected_kv_write.functional import PLACED
from plugins.trt_cache import FLOATS
from plugins.trt_case import PluginCase, network_tensor

_TABLES = ("shadow_table", "page_table")


def place_case(seed: int, dtype: torch.dtype) -> PluginCase:
    """Lists of a random case, behind keys that are rebuilt."""
    given = OPERATOR.bind(*random_case(seed, small=True, dtypes=(dtype,)))
    size, (sequences, kv_heads, places) = given["chunk_size"], given["chunks"].shape
    given["keys"] = torch.empty(sequences, kv_heads, places * size, given["k_pool"].shape[3], dtype=dtype)
    inputs = tuple(network_tensor(given[name], (0, 1) if name in _TABLES else (0,)) for name in PLACED)
    outputs = [(given[name].dtype, tuple(given[name].shape)) for name in OPERATOR.writes]
    aliases = {index: PLACED.index(name) for index, name in enumerate(OPERATOR.writes)}
    return PluginCase("SelectedKvPlace", inputs, {"chunk_size": size}, outputs, aliases)


def plugin_cases() -> list[PluginCase]:
    """With each dtype, of lists that may hold something."""
    found = []
    for dtype in FLOATS:
        cases = (place_case(seed, dtype) for seed in range(20))
        found.append(next(case for case in cases if case.inputs[0].shape[2] > 0))
    return found
