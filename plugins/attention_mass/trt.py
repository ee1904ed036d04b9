"""TensorRT plugins of AttentionMass, one for each of its kernels, each with a Dynamic form for caches with a scale per
token and head; statistics are updated in place."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from plugins.attention_mass.functional import ADDED, COMMON, SCALES
from plugins.attention_mass.reference import SUM, SUM_AND_SQUARES
from plugins.triton_kernel import KernelSpec
from plugins.trt_cache import EIGHT_BIT, FLOATS, cache_layout
from plugins.trt_plugin import Attributes, InPlace, Outputs, PluginDefinition, SymbolicTensor, Tensors

if TYPE_CHECKING:
    from plugins.attention_mass.cuda import MassShape


def _totals(inputs: Mapping[str, SymbolicTensor], attributes: Attributes) -> Outputs:
    q = inputs["q"].shape
    return (SymbolicTensor(torch.float32, (q[0], q[1], 2)),)


def _in_place(*names: str) -> Callable[[Mapping[str, SymbolicTensor], Attributes], Outputs]:
    return lambda inputs, attributes: tuple(map(InPlace, names))


def _shape(tensors: Tensors, attributes: Attributes) -> "MassShape":
    from plugins.attention_mass.cuda import MassShape

    q, kind = tensors["q"], SUM_AND_SQUARES if "squares" in tensors else attributes.get("kind", SUM)
    return MassShape(cache_layout(tensors, attributes), q.dtype, q.size(1), attributes["scale"], kind)


def _totals_spec(tensors: Tensors, attributes: Attributes, capability: int) -> KernelSpec:
    from plugins.attention_mass.cuda import totals_spec

    shape = _shape(tensors, attributes)
    return totals_spec(shape, shape.blocks)


def _add_spec(tensors: Tensors, attributes: Attributes, capability: int) -> KernelSpec:
    from plugins.attention_mass.cuda import add_spec

    shape = _shape(tensors, attributes)
    return add_spec(shape, shape.blocks)


def _types(dynamic: bool, num_states: int = 0) -> tuple[tuple[torch.dtype, ...], ...]:
    """Of the totals, or with `num_states` of what adds to so many statistics."""
    f32, counts = torch.float32, (torch.int32,) * 5
    scales = (f32,) if dynamic else ()
    more, states = ((f32,), (f32,) * num_states) if num_states else ((), ())
    return tuple(
        (*more, q, cache, *counts, *((torch.int32,) if num_states else ()), *states, *scales, *(states or (f32,)))
        for q in FLOATS
        for cache in (EIGHT_BIT if dynamic else (*FLOATS, *EIGHT_BIT))
    )


def _plugins(dynamic: bool) -> tuple[PluginDefinition, ...]:
    ending, scales = ("Dynamic", SCALES) if dynamic else ("", ())
    k_scale = () if dynamic else (("k_scale", float),)
    return (
        PluginDefinition(
            name=f"AttentionMassTotals{ending}",
            inputs=(*COMMON, *scales),
            outputs=_totals,
            num_outputs=1,
            types=_types(dynamic),
            spec=_totals_spec,
            attributes=(("scale", float), *k_scale),
        ),
        PluginDefinition(
            name=f"AttentionMassAdd{ending}",
            inputs=(*ADDED, *scales),
            outputs=_in_place("mass"),
            num_outputs=1,
            types=_types(dynamic, num_states=1),
            spec=_add_spec,
            attributes=(("scale", float), ("kind", int), *k_scale),
        ),
        PluginDefinition(
            name=f"AttentionMassAddSquares{ending}",
            inputs=(*ADDED, "squares", *scales),
            outputs=_in_place("mass", "squares"),
            num_outputs=2,
            types=_types(dynamic, num_states=2),
            spec=_add_spec,
            attributes=(("scale", float), *k_scale),
        ),
    )


PLUGINS = (*_plugins(dynamic=False), *_plugins(dynamic=True))
