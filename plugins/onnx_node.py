"""What an ONNX node of this project is: its name, inputs, outputs, attributes and the function that it calls."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from onnx import FunctionProto, NodeProto, helper

from plugins.onnx_body import DOMAIN

PLUGIN_ATTRIBUTES = {"plugin_namespace": DOMAIN, "plugin_version": "1"}
"""By these TensorRT finds the plugin for a node."""


class Cache(Enum):
    """What the body of a function has to know of the pools' elements; FLOAT is any float of 16 bits or more."""

    FLOAT = "float"
    E4M3 = "float8_e4m3fn"
    INT8 = "int8"
    INT4 = "int4"


@dataclass(frozen=True)
class OnnxNode:
    """One node type of the domain `kvforge`; also the TensorRT plugin of that name.

    `attributes` maps names to int or float; a node carries all of them. `body(cache)` is the function for a cache of
    that kind; a model has one kind, so one function per name. `caches` are the kinds that exist.

    Inputs and attributes have the names of the operator's arguments. An exported call of `kvforge::<calls>` (by default
    the operator, where one node does all it does) becomes the node of that operator with the most inputs that are all
    given. Other inputs are outputs of the operator's nodes before; `sizes` says which attributes are dimensions of the
    operator's tensors: (tensor, dimension).
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    body: Callable[[Cache], FunctionProto]
    attributes: tuple[tuple[str, type], ...] = ()
    caches: tuple[Cache, ...] = (Cache.FLOAT,)
    calls: str | None = None
    sizes: Mapping[str, tuple[str, int]] = field(default_factory=dict)

    def node(self, inputs: list[str], outputs: list[str], **attributes: Any) -> NodeProto:
        """A node that calls the function; raises ValueError when an attribute is missing or unknown."""
        if set(attributes) != {name for name, _ in self.attributes}:
            raise ValueError(f"{self.name} takes the attributes {[name for name, _ in self.attributes]}.")
        typed = {name: kind(attributes[name]) for name, kind in self.attributes}
        return helper.make_node(self.name, inputs, outputs, domain=DOMAIN, **typed, **PLUGIN_ATTRIBUTES)


def matching(nodes: Iterable[OnnxNode], given: Mapping[str, Any]) -> OnnxNode:
    """The node with the most inputs, all of which are given; raises ValueError where there is none."""
    return max((n for n in nodes if all(given.get(x) is not None for x in n.inputs)), key=lambda n: len(n.inputs))
