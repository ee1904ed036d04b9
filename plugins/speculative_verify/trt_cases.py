"""Networks' inputs for the plugins of speculative_verify."""

import torch

from plugins.speculative_verify.cases import random_case
from plugins.trt_case import PluginCase, network_tensor, new


def verify_case(seed: int) -> PluginCase:
    arguments = random_case(seed, small=True)
    outputs, aliases = new(*((torch.int32, tuple(arguments[4].shape)),) * 2)
    return PluginCase("SpeculativeVerify", tuple(map(network_tensor, arguments)), {}, outputs, aliases)


def plugin_cases() -> list[PluginCase]:
    """Every plugin with the dtypes that it takes."""
    return [verify_case(seed) for seed in (1, 2)]
