"""Asks a plugin what TensorRT's builder asks, through NVIDIA's own plugin classes.

Only the dimension expressions, which the builder makes, are stand-ins: they compute with the numbers of one step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from plugins.trt_case import Dynamic, NetworkTensor

NAMESPACE = "kvforge"


@dataclass(frozen=True)
class Answers:
    """What the builder learns: `outputs` as (dtype, shape), `aliases` output index -> input index, or -1."""

    outputs: list[tuple[torch.dtype, tuple[int, ...]]]
    aliases: dict[int, int]
    combinations: list[tuple[torch.dtype, ...]]
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    extra: list[int]
    entry: str
    ptx: str


class _Expression:
    """A dimension in a step; TensorRT's Python code takes it for an `IDimensionExpr`."""

    kind: type = object

    def __init__(self, value: int) -> None:
        self.value = int(value)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return self.kind


class _ExpressionBuilder:
    def __init__(self, trt: ModuleType) -> None:
        operation = trt.DimensionOperation
        self._functions = {
            operation.SUM: lambda a, b: a + b,
            operation.SUB: lambda a, b: a - b,
            operation.PROD: lambda a, b: a * b,
            operation.FLOOR_DIV: lambda a, b: a // b,
            operation.CEIL_DIV: lambda a, b: -(-a // b),
            operation.MAX: max,
            operation.MIN: min,
            operation.EQUAL: lambda a, b: int(a == b),
            operation.LESS: lambda a, b: int(a < b),
        }

    def constant(self, value: int) -> _Expression:
        return _Expression(value)

    def operation(self, operation: Any, first: _Expression, second: _Expression) -> _Expression:
        return _Expression(self._functions[operation](first.value, second.value))


class _Extra(list):
    nbSymExprs = 0

    def __setitem__(self, index: Any, value: Any) -> None:
        assert index == len(self)
        self.append(value)


class _Launch:
    """Takes whatever the plugin sets."""


def create_plugin(trt: ModuleType, name: str, attributes: Mapping[str, float | int]) -> Any:
    """The plugin as the ONNX parser makes it: FLOAT attributes as float32 fields, INT as int32, and in the order in
    which the creator declares them, whatever the node's order (NVIDIA's class hands them on by position)."""
    creator = trt.get_plugin_registry().get_creator(name, "1", NAMESPACE)
    assert creator is not None, f"{NAMESPACE}::{name} is not registered"
    kinds = {float: (np.float32, trt.PluginFieldType.FLOAT32), int: (np.int32, trt.PluginFieldType.INT32)}
    fields = []
    for key in (field.name for field in creator.field_names):
        dtype, kind = kinds[type(attributes[key])]
        fields.append(trt.PluginField(key, np.array([attributes[key]], dtype), kind))
    assert len(fields) == len(attributes)
    return creator.create_plugin(
        name,
        NAMESPACE,
        trt.PluginFieldCollection(fields),
        trt.TensorRTPhase.BUILD,
        trt.QuickPluginCreationRequest.STRICT_AOT,
    )


def ask(
    trt: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    inputs: Sequence[NetworkTensor],
    attributes: Mapping[str, float | int],
) -> Answers:
    """Create the plugin and ask in the builder's order; raises what the plugin raises."""
    import tensorrt.plugin as trtp

    from plugins.trt_plugin import torch_dtype

    data_types = {torch_dtype(t): t for t in trt.DataType.__members__.values() if t.name in _KNOWN}
    plugin = create_plugin(trt, name, attributes)
    builder = _ExpressionBuilder(trt)
    monkeypatch.setattr(_Expression, "kind", trt.IDimensionExpr)
    monkeypatch.setattr(trt, "DimsExprs", lambda length: [None] * length)
    monkeypatch.setattr(trtp._tensor, "SymExprImpl", lambda expression: expression._expr.value)

    types = plugin.get_output_data_types([data_types[t.dtype] for t in inputs], [len(t.shape) for t in inputs])
    shapes = plugin.get_output_shapes([[_Expression(size) for size in t.shape] for t in inputs], [], builder)
    outputs = [
        (torch_dtype(kind), tuple(size.value for size in shape)) for kind, shape in zip(types, shapes, strict=True)
    ]
    described = [_described(trt, data_types[t.dtype], t.shape) for t in inputs]
    described += [_described(trt, data_types[dtype], shape) for dtype, shape in outputs]
    count = len(described)
    formats = plugin.get_supported_format_combinations(described, len(inputs))
    combinations = [
        tuple(torch_dtype(f.type) for f in formats[start : start + count]) for start in range(0, len(formats), count)
    ]
    plugin.configure_plugin(described[: len(inputs)], described[len(inputs) :])
    assert plugin.get_valid_tactics() == []
    plugin.set_tactic(0)
    launch, extra = _Launch(), _Extra()
    plugin.get_launch_params(None, described, len(inputs), launch, extra, builder)
    entry, ptx = plugin.get_kernel(
        [d.desc for d in described[: len(inputs)]], [d.desc for d in described[len(inputs) :]]
    )
    assert extra.nbSymExprs == len(extra)
    return Answers(
        outputs=outputs,
        aliases={index: plugin.get_aliased_input(index) for index in range(len(outputs))},
        combinations=combinations,
        grid=(launch.grid_x, launch.grid_y, launch.grid_z),
        block=(launch.block_x, launch.block_y, launch.block_z),
        shared_bytes=launch.shared_mem,
        extra=list(extra),
        entry=entry,
        ptx=ptx.decode(),
    )


_KNOWN = ("FLOAT", "HALF", "BF16", "FP8", "INT8", "INT32", "INT64")


def _described(trt: ModuleType, data_type: Any, shape: tuple[int, ...]) -> Any:
    described = trt.DynamicPluginTensorDesc()
    described.desc.type = data_type
    described.desc.format = trt.TensorFormat.LINEAR
    described.desc.dims = trt.Dims(tuple(-1 if isinstance(size, Dynamic) else size for size in shape))
    return described
