"""What an ONNX node of this project is: its name, inputs, outputs, attributes and the function that it calls."""

from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class OnnxOperator:
    """One node type of the domain `kvforge`; also the TensorRT plugin of that name.

    `attributes` maps names to int or float; a node carries all of them. `body(cache)` is the function for a cache of
    that kind; a model has one kind, so one function per name. `caches` are the kinds that exist.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: tuple[tuple[str, type], ...]
    body: Callable[[Cache], FunctionProto]
    caches: tuple[Cache, ...] = (Cache.FLOAT,)

    def node(self, inputs: list[str], outputs: list[str], **attributes: Any) -> NodeProto:
        """A node that calls the function; raises ValueError when an attribute is missing or unknown."""
        if set(attributes) != {name for name, _ in self.attributes}:
            raise ValueError(f"{self.name} takes the attributes {[name for name, _ in self.attributes]}.")
        typed = {name: kind(attributes[name]) for name, kind in self.attributes}
        return helper.make_node(self.name, inputs, outputs, domain=DOMAIN, **typed, **PLUGIN_ATTRIBUTES)
