"""Networks' inputs for the plugins of attention_mass."""

import functools

import torch

from plugins.attention_mass import OPERATOR
from plugins.attention_mass.cases import random_case
from plugins.attention_mass.functional import ADDED, COMMON, SCALES
from plugins.attention_mass.reference import BELOW, SUM_AND_SQUARES
from plugins.cases import CacheFormat
from plugins.trt_case import PluginCase, cached, network_tensor, new

_TABLES = ("page_table", "state_table")


def mass_case(seed: int, cache: CacheFormat, dtype: torch.dtype, step: str) -> PluginCase:
    """A case of the plugin `AttentionMass<step>`."""
    kind = SUM_AND_SQUARES if step == "AddSquares" else BELOW
    given = OPERATOR.bind(*random_case(seed, small=True, dtypes=(dtype,), formats=(cache,), kind=kind))
    given["totals"] = torch.empty(*given["q"].shape[:2], 2)
    states = {"Totals": (), "Add": ("mass",), "AddSquares": ("mass", "squares")}[step]
    names = COMMON if step == "Totals" else (*ADDED, *states[1:])
    names = (*names, *(SCALES if cache.dynamic else ()))
    inputs = tuple(network_tensor(given[name], (0, 1) if name in _TABLES else (0,)) for name in names)
    attributes = {"scale": given["scale"]}
    if step == "Add":
        attributes["kind"] = kind
    if not cache.dynamic:
        attributes["k_scale"] = given["k_scale"]
    outputs, aliases = new((torch.float32, tuple(given["totals"].shape)))
    if states:
        outputs = [(torch.float32, tuple(given[name].shape)) for name in states]
        aliases = {index: names.index(name) for index, name in enumerate(states)}
    name = f"AttentionMass{step}{'Dynamic' if cache.dynamic else ''}"
    return PluginCase(name, inputs, attributes, outputs, aliases)


def plugin_cases() -> list[PluginCase]:
    """Every plugin with the dtypes that it takes."""
    return [
        case for step in ("Totals", "Add", "AddSquares") for case in cached(functools.partial(mass_case, step=step))
    ]
