"""A compiled kernel with all that starting it takes, as data that a plan can hold: nothing of Triton is needed then."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plugins.errors import PluginError
from plugins.triton_cache import check_capability
from plugins.triton_ptx import compile_ptx
from plugins.trt_plugin import Attributes, PluginDefinition, Tensors, specialised
from plugins.trt_target import FORWARD_COMPATIBLE

_OPERATORS = {
    "+": lambda left, right: left + right,
    "-": lambda left, right: left - right,
    "*": lambda left, right: left * right,
    "//": lambda left, right: left // right,
}


class Recorder:
    """A size that writes down what is computed with it: a formula, its operators after their operands, "s0 15 + 16 //"
    for (s0 + 15) // 16."""

    def __init__(self, formula: str) -> None:
        self.formula = formula

    def __add__(self, other: Any) -> "Recorder":
        return self._computed("+", other)

    def __sub__(self, other: Any) -> "Recorder":
        return self._computed("-", other)

    def __mul__(self, other: Any) -> "Recorder":
        return self._computed("*", other)

    def __floordiv__(self, other: Any) -> "Recorder":
        return self._computed("//", other)

    def _computed(self, operator: str, other: Any) -> "Recorder":
        return Recorder(f"{self.formula} {formula_of(other)} {operator}")


def formula_of(value: Any) -> str:
    """The formula that computes `value`, an int or a Recorder."""
    return value.formula if isinstance(value, Recorder) else str(int(value))


def evaluate(formula: str, values: Mapping[str, int]) -> int:
    """What a formula gives where its names have these values."""
    stack: list[int] = []
    for token in formula.split(" "):
        if token in _OPERATORS:
            right, left = stack.pop(), stack.pop()
            stack.append(_OPERATORS[token](left, right))
        else:
            stack.append(values[token] if token in values else int(token))
    (result,) = stack
    return result


@dataclass(frozen=True)
class Launch:
    """How a plugin starts its kernel.

    The kernel's arguments are the inputs, then int32 `sizes`, each given as (input, dimension), then the outputs.
    `grid` are the formulas of its three dimensions, in which the sizes are s0, s1, …. `capability`: what the PTX was
    compiled for.
    """

    entry: str
    ptx: str
    num_threads: int
    shared_bytes: int
    sizes: tuple[tuple[int, int], ...]
    grid: tuple[str, str, str]
    capability: int

    def sizes_of(self, shapes: Sequence[Sequence[int]]) -> list[int]:
        """The kernel's int32 arguments for inputs of these shapes."""
        return [int(shapes[index][dim]) for index, dim in self.sizes]

    def grid_of(self, sizes: Sequence[int]) -> tuple[int, int, int]:
        """The grid for these int32 arguments."""
        values = {f"s{number}": size for number, size in enumerate(sizes)}
        x, y, z = (evaluate(formula, values) for formula in self.grid)
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
    recorders = {size.name: Recorder(f"s{number}") for number, size in enumerate(spec.sizes)}
    x, y, z = spec.grid(recorders)
    return Launch(
        entry=kernel.entry,
        ptx=kernel.ptx,
        num_threads=kernel.num_threads,
        shared_bytes=kernel.shared_bytes,
        sizes=tuple((definition.inputs.index(size.tensor), size.dim) for size in spec.sizes),
        grid=(formula_of(x), formula_of(y), formula_of(z)),
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


MAGIC = "kvforge kernels"


def pack(found: Sequence[Launch]) -> bytes:
    """The kernels as bytes, for a plan: a line with their number, then of each a line and the PTX."""
    parts = [f"{MAGIC} {len(found)}\n"]
    for launch in found:
        numbers = (launch.capability, launch.num_threads, launch.shared_bytes, len(launch.ptx))
        sizes = " ".join(f"{index} {dim}" for index, dim in launch.sizes)
        parts.append(f"{' '.join(map(str, numbers))}|{launch.entry}|{sizes}|{'|'.join(launch.grid)}\n{launch.ptx}")
    return "".join(parts).encode("ascii")


def unpack(data: bytes) -> tuple[Launch, ...]:
    """What `pack` packed; raises ValueError for anything else."""
    first, rest = data.split(b"\n", 1)
    if not first.startswith(MAGIC.encode()):
        raise ValueError("these are no kernels")
    found = []
    for _ in range(int(first[len(MAGIC) :])):
        line, rest = rest.split(b"\n", 1)
        numbers, entry, sizes, x, y, z = line.decode("ascii").split("|")
        capability, num_threads, shared_bytes, length = map(int, numbers.split(" "))
        places = [int(number) for number in sizes.split()]
        pairs = tuple(zip(places[::2], places[1::2], strict=True))
        ptx, rest = rest[:length].decode("ascii"), rest[length:]
        found.append(Launch(entry, ptx, num_threads, shared_bytes, pairs, (x, y, z), capability))
    return tuple(found)
