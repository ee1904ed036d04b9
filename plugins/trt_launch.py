"""A compiled kernel with all that starting it takes, as data that a plan can hold: nothing of Triton is needed then."""

import dataclasses
import functools
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plugins.errors import PluginError
from plugins.triton_cache import check_capability
from plugins.triton_ptx import compile_ptx
from plugins.trt_plugin import Attributes, PluginDefinition, Tensors, specialised
from plugins.trt_target import FORWARD_COMPATIBLE

Formula = Any
"""Of a grid's dimension: an int, the number of a size as ``["size", n]``, or ``[operator, left, right]``."""

_OPERATORS = {
    "+": lambda left, right: left + right,
    "-": lambda left, right: left - right,
    "*": lambda left, right: left * right,
    "//": lambda left, right: left // right,
}


class Recorder:
    """A size that writes down what is computed with it, as a formula."""

    def __init__(self, formula: Formula) -> None:
        self.formula = formula

    def __add__(self, other: Any) -> "Recorder":
        return Recorder(["+", self.formula, formula_of(other)])

    def __sub__(self, other: Any) -> "Recorder":
        return Recorder(["-", self.formula, formula_of(other)])

    def __mul__(self, other: Any) -> "Recorder":
        return Recorder(["*", self.formula, formula_of(other)])

    def __floordiv__(self, other: Any) -> "Recorder":
        return Recorder(["//", self.formula, formula_of(other)])


def formula_of(value: Any) -> Formula:
    """The formula that computes `value`, an int or a Recorder."""
    return value.formula if isinstance(value, Recorder) else int(value)


def evaluate(formula: Formula, sizes: Sequence[int]) -> int:
    """What a formula gives for these sizes."""
    if isinstance(formula, int):
        return formula
    if formula[0] == "size":
        return sizes[formula[1]]
    name, left, right = formula
    return _OPERATORS[name](evaluate(left, sizes), evaluate(right, sizes))


@dataclass(frozen=True)
class Launch:
    """How a plugin starts its kernel.

    The kernel's arguments are the inputs, then int32 `sizes`, each given as (input, dimension), then the outputs.
    `grid` are the formulas of its three dimensions, as JSON. `capability`: what the PTX was compiled for.
    """

    entry: str
    ptx: str
    num_threads: int
    shared_bytes: int
    sizes: tuple[tuple[int, int], ...]
    grid: str
    capability: int

    def sizes_of(self, shapes: Sequence[Sequence[int]]) -> list[int]:
        """The kernel's int32 arguments for inputs of these shapes."""
        return [int(shapes[index][dim]) for index, dim in self.sizes]

    def grid_of(self, sizes: Sequence[int]) -> tuple[int, int, int]:
        """The grid for these int32 arguments."""
        x, y, z = (evaluate(formula, sizes) for formula in json.loads(self.grid))
        return x, y, z


def launches(
    definition: PluginDefinition, tensors: Tensors, attributes: Attributes, capabilities: Sequence[int]
) -> tuple[Launch, ...]:
    """The plugin's kernel compiled for each of these compute capabilities (90: 9.0) that can have its tensors.

    Raises PluginError when there is none.
    """
    refusal = None
    found = []
    for capability in capabilities:
        try:
            for tensor in tensors.values():
                check_capability(tensor.dtype, capability)
        except PluginError as error:
            refusal = error
            continue
        found.append(_launch(definition, tuple(tensors.items()), tuple(attributes.items()), capability))
    if not found:
        raise refusal or PluginError(f"{definition.name} is compiled for no GPU; name a compute capability.")
    return tuple(found)


@functools.lru_cache(maxsize=256)
def _launch(definition: PluginDefinition, tensors: tuple, attributes: tuple, capability: int) -> Launch:
    spec = specialised(definition, dict(tensors), dict(attributes), capability)
    kernel = compile_ptx(spec, capability)
    recorders = {size.name: Recorder(["size", number]) for number, size in enumerate(spec.sizes)}
    return Launch(
        entry=kernel.entry,
        ptx=kernel.ptx,
        num_threads=kernel.num_threads,
        shared_bytes=kernel.shared_bytes,
        sizes=tuple((definition.inputs.index(size.tensor), size.dim) for size in spec.sizes),
        grid=json.dumps([formula_of(entry) for entry in spec.grid(recorders)]),
        capability=capability,
    )


def choose(found: Sequence[Launch], capability: int) -> Launch:
    """The kernel that a GPU of this compute capability (90: 9.0) runs best; raises PluginError where it runs none."""
    exact = [launch for launch in found if launch.capability == capability]
    older = [launch for launch in found if launch.capability in FORWARD_COMPATIBLE and launch.capability <= capability]
    if not (exact or older):
        compiled = ", ".join(f"{launch.capability // 10}.{launch.capability % 10}" for launch in found)
        raise PluginError(
            f"The plan's kernels are for compute capability {compiled}, and this GPU has "
            f"{capability // 10}.{capability % 10}; build the engine for it."
        )
    return (exact or sorted(older, key=lambda launch: launch.capability))[-1]


def pack(found: Sequence[Launch]) -> bytes:
    """The kernels as bytes, for a plan."""
    return zlib.compress(json.dumps([dataclasses.asdict(launch) for launch in found]).encode(), 9)


def unpack(data: bytes) -> tuple[Launch, ...]:
    """What `pack` packed."""

    def launch(fields: Mapping[str, Any]) -> Launch:
        sizes = tuple((index, dim) for index, dim in fields["sizes"])
        return Launch(**{**fields, "sizes": sizes})

    return tuple(map(launch, json.loads(zlib.decompress(data))))
