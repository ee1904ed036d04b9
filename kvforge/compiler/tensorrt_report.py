"""What TensorRT for RTX says of a plan that it built: its layers, what they compute in, and what they take of memory.

It says so in its log, and without a GPU nothing else tells. TensorRT 11 says it otherwise, and nothing is read there.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from kvforge.common.errors import BuildError
from kvforge.compiler.options import ResolvedOptions

_LAYER = re.compile(
    r"^Name: (?P<name>.*?), LayerType: (?P<kind>\w+), Inputs: (?P<inputs>.*?), (?:Constants: (?P<constants>.*?), )?"
    r"Outputs: ",
    re.MULTILINE,
)
_TENSOR = re.compile(r"Dimensions: \[([^\]]*)\][^}]*?Datatype: (\w+)")
_NUMBER = "1"
"""The dimensions of a factor that a product is scaled by, which is in float32."""
_SIZES = {
    "weight_bytes": re.compile(r"^Total Weights Memory: (\d+) bytes"),
    "activation_bytes": re.compile(r"^Total Activation Memory: (\d+) bytes"),
    "persistent_bytes": re.compile(r"^Total Device Persistent Memory: (\d+) bytes"),
}
_LAYERS = "Layers:"
_PRODUCTS = ("gemm", "runtime_fusion")
_NAMES = {torch.float32: "Float", torch.float16: "Half", torch.bfloat16: "BFloat16"}
_FLOATS = frozenset((*_NAMES.values(), "FP8"))
_SLACK, _SLACK_BYTES = 1.1, 2**16
"""Weights are padded; beyond this some are there twice, or in a wider dtype."""


@dataclass(frozen=True)
class Layer:
    """One layer of a plan in one profile; ``datatypes`` are those of its inputs and constants."""

    name: str
    kind: str
    datatypes: tuple[str, ...]


@dataclass(frozen=True)
class PlanReport:
    """Of one plan. ``weight_bytes`` are in the plan and on the GPU, ``activation_bytes`` the working memory of a step,
    the largest profile's, ``persistent_bytes`` what a context keeps beside them."""

    layers: tuple[Layer, ...]
    weight_bytes: int
    activation_bytes: int
    persistent_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Return the sizes, and how many layers there are of each kind, as JSON-ready data."""
        sizes = {name: value for name, value in dataclasses.asdict(self).items() if name != "layers"}
        return {**sizes, "layers": dict(sorted(Counter(layer.kind for layer in self.layers).items()))}


def is_of_the_report(message: str) -> bool:
    """Whether a line of the builder's log is one of those that ``read_report`` reads."""
    return message.startswith(_LAYERS) or any(pattern.match(message) for pattern in _SIZES.values())


def read_report(said: Sequence[str], graph: str) -> PlanReport:
    """Return what the lines of the log say, of all profiles; raises BuildError where they say nothing."""
    sizes = {
        name: [int(match[1]) for message in said if (match := pattern.match(message))]
        for name, pattern in _SIZES.items()
    }
    layers = [match for message in said if message.startswith(_LAYERS) for match in _LAYER.finditer(message)]
    if not layers or not all(sizes.values()):
        _fail(graph, "is not described in the builder's log, as that of TensorRT for RTX 1.7 is")
    return PlanReport(
        tuple(
            Layer(match["name"], match["kind"], _datatypes(f"{match['inputs']}{match['constants'] or ''}"))
            for match in layers
        ),
        **{name: max(found) for name, found in sizes.items()},
    )


def _datatypes(tensors: str) -> tuple[str, ...]:
    return tuple(datatype for shape, datatype in _TENSOR.findall(tensors) if shape != _NUMBER)


def check_report(
    report: PlanReport, graph: str, options: ResolvedOptions, weight_bytes: int, plugin_layers: Iterable[str]
) -> None:
    """Check that the plan holds weights of this size once, computes products in the engine's dtype, and has these
    plugins in each profile.

    Raises:
        BuildError: naming the layer that breaks a rule.
    """
    if not weight_bytes <= report.weight_bytes <= _SLACK * weight_bytes + _SLACK_BYTES:
        _fail(graph, f"holds {report.weight_bytes} bytes of weights, and the network has {weight_bytes}")
    asked = _NAMES[options.torch_dtype]
    for layer in report.layers:
        others = sorted((set(layer.datatypes) & _FLOATS) - {asked})
        if layer.kind in _PRODUCTS and others:
            _fail(graph, f"computes {layer.name} in {others[0]}, not in {asked}")
    names = Counter(layer.name.split(" [profile ")[0].split("_myl")[0] for layer in report.layers)
    for name in plugin_layers:
        if not names[name]:
            _fail(graph, f"has no layer {name}")


def _fail(graph: str, what: str) -> NoReturn:
    raise BuildError(f"The plan of {graph} {what}; report it with the builder's version, and build another target.")
