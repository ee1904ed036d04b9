"""Networks' inputs for a plugin, from the operator's random cases, and what its definition says of the outputs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from plugins.cases import FORMATS, CacheFormat


class Dynamic(int):
    """A dimension that differs from step to step; this is its size in the step of the test."""


@dataclass(frozen=True)
class NetworkTensor:
    """One input of the plugin in the network."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class PluginCase:
    """What a plugin gets, and what the operator's definition says of its outputs.

    `outputs` are (dtype, shape), `aliases` maps an output's index to that of its input, or -1.
    """

    plugin: str
    inputs: tuple[NetworkTensor, ...]
    attributes: dict[str, float | int]
    outputs: list[tuple[torch.dtype, tuple[int, ...]]]
    aliases: dict[int, int]


def network_tensor(tensor: torch.Tensor, dynamic: Sequence[int] = (0,)) -> NetworkTensor:
    """The input in the network: these dimensions differ from step to step."""
    return NetworkTensor(tensor.dtype, tuple(Dynamic(n) if i in dynamic else n for i, n in enumerate(tensor.shape)))


def new(*outputs: tuple[torch.dtype, tuple[int, ...]]) -> tuple[list, dict[int, int]]:
    """Outputs that alias no input, and their aliases."""
    return list(outputs), {index: -1 for index in range(len(outputs))}


def cached(make: Callable[[int, CacheFormat, torch.dtype], PluginCase]) -> list[PluginCase]:
    """One case per format of the cache, float16 for q or k, and the other float types with a cache of their own."""
    cases = [make(seed, cache, torch.float16) for seed, cache in enumerate(FORMATS)]
    return cases + [make(seed, FORMATS[0], dtype) for seed, dtype in ((7, torch.float32), (8, torch.bfloat16))]
