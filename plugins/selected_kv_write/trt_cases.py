"""Networks' inputs for the plugin of selected_kv_write."""

import torch

from plugins.selected_kv_write import OPERATOR
from plugins.selected_kv_write.cases import random_case
from plugins.trt_cache import FLOATS
from plugins.trt_case import PluginCase, network_tensor

_TABLES = ("shadow_table", "page_table")


def write_case(seed: int, dtype: torch.dtype) -> PluginCase:
    given = OPERATOR.bind(*random_case(seed, small=True, dtypes=(dtype,)))
    inputs = tuple(
        network_tensor(given[name], {**dict.fromkeys(_TABLES, (0, 1)), "cos": (), "sin": ()}.get(name, (0,)))
        for name in OPERATOR.tensors
    )
    outputs = [(given[name].dtype, tuple(given[name].shape)) for name in OPERATOR.writes]
    aliases = {index: OPERATOR.tensors.index(name) for index, name in enumerate(OPERATOR.writes)}
    return PluginCase("SelectedKvWrite", inputs, {"chunk_size": given["chunk_size"]}, outputs, aliases)


def plugin_cases() -> list[PluginCase]:
    """With each dtype, of lists that may hold something."""
    found = []
    for dtype in FLOATS:
        cases = (write_case(seed, dtype) for seed in range(20))
        found.append(next(case for case in cases if case.inputs[4].shape[2] > 0))
    return found
