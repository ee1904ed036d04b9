"""Writing the body of a model-local ONNX function: standard operators of opset 20, one call per node.

A value is its name (a string). Bodies take tensors of any size in the dimensions that the operator leaves open; they
are meant to be right anywhere, not to be fast.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from onnx import AttributeProto, FunctionProto, NodeProto, TensorProto, helper, numpy_helper

OPSET = 20
DOMAIN = "kvforge"
DOMAIN_VERSION = 1

Value = str


class FunctionBody:
    """Collects nodes; `body.Add(x, y)` appends one and returns its output (`outputs=n`: a tuple of n).

    Other keyword arguments are the node's attributes.
    """

    def __init__(self, prefix: str = "") -> None:
        self.nodes: list[NodeProto] = []
        self._prefix = prefix
        self._constants: dict[tuple[str, bytes, tuple[int, ...]], Value] = {}
        self._num_subgraphs = 0

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        if op_type.startswith("_"):
            raise AttributeError(op_type)

        def append(*inputs: Value, outputs: int = 1, **attributes: Any) -> Any:
            index = len(self.nodes)
            names = [f"{self._prefix}{op_type.lower()}_{index}_{i}" for i in range(outputs)]
            self.nodes.append(helper.make_node(op_type, inputs, names, **attributes))
            return names[0] if outputs == 1 else tuple(names)

        return append

    def constant(self, value: Any, dtype: type[np.generic] = np.int64) -> Value:
        """A constant tensor of the shape of `value`; equal constants are one node."""
        array = np.asarray(value, dtype=dtype)
        key = (array.dtype.str, array.tobytes(), array.shape)
        if key not in self._constants:
            self._constants[key] = self.Constant(value=numpy_helper.from_array(array))
        return self._constants[key]

    def int_attribute(self, name: str) -> Value:
        """The attribute `name` of the function's node as an int64 scalar."""
        return self._attribute("value_int", name, AttributeProto.INT)

    def float_attribute(self, name: str) -> Value:
        """The attribute `name` of the function's node as a float32 scalar."""
        return self._attribute("value_float", name, AttributeProto.FLOAT)

    def _attribute(self, field: str, name: str, kind: AttributeProto.AttributeType) -> Value:
        value = self.Constant()
        self.nodes[-1].attribute.append(AttributeProto(name=field, ref_attr_name=name, type=kind))
        return value

    def size(self, value: Value, dim: int) -> Value:
        """A dimension as a scalar."""
        return self.Squeeze(self.Shape(value, start=dim, end=dim + 1))

    def shape(self, *sizes: Value | int) -> Value:
        """The 1-D tensor of these scalars, to reshape with."""
        one = self.constant([1])
        parts = [self.constant([s]) if isinstance(s, int) else self.Reshape(s, one) for s in sizes]
        return self.Concat(*parts, axis=0)

    def rows(self, value: Value, begin: Value, end: Value) -> Value:
        """`value[begin:end]` for scalars `begin` and `end`."""
        return self.Slice(value, self.shape(begin), self.shape(end), self.constant([0]))

    def range(self, begin: Value, end: Value) -> Value:
        """The int64 numbers from one scalar up to another."""
        return self.Range(begin, end, self.constant(1))

    def nonempty(self, starts: Value) -> Value:
        """The numbers s of the groups `starts[s]:starts[s+1]` that hold something; `starts` is [groups + 1] int64."""
        groups = self.Sub(self.size(starts, 0), self.constant(1))
        begins = self.rows(starts, self.constant(0), groups)
        ends = self.rows(starts, self.constant(1), self.Add(groups, self.constant(1)))
        return self.Compress(self.range(self.constant(0), groups), self.Greater(ends, begins), axis=0)

    def largest(self, value: Value) -> Value:
        """The maximum over the last dimension, which is kept with size 1; arbitrary where there is a NaN.

        One row is added and dropped again, because onnxruntime returns an empty tensor unreduced.
        """
        first = self.shape(1)
        shape = self.Concat(first, self.Slice(self.Shape(value), first, self.constant([2**62])), axis=0)
        padding = self.CastLike(self.Expand(self.constant(0), shape), value)
        padded = self.Concat(value, padding, axis=0)
        index = self.ArgMax(padded, axis=-1, keepdims=1)
        return self.rows(self.GatherElements(padded, index, axis=-1), self.constant(0), self.size(value, 0))

    def to(self, value: Value, dtype: TensorProto.DataType) -> Value:
        """`value` converted; numbers out of the range of an 8-bit float saturate."""
        return self.Cast(value, to=dtype)

    def to_int64(self, value: Value) -> Value:
        """`value` as int64, what indices have to be."""
        return self.to(value, TensorProto.INT64)

    def loop(
        self, trip_count: Value, initial: Value, rank: int, step: Callable[["FunctionBody", Value, Value], Value]
    ) -> Value:
        """`for i in range(trip_count): x = step(body, i, x)` for one float32 tensor of `rank`; returns the last x."""
        self._num_subgraphs += 1
        prefix = f"{self._prefix}loop{self._num_subgraphs}_"
        inner = FunctionBody(prefix)
        index, condition, carried = (prefix + name for name in ("i", "condition", "carried"))
        result = step(inner, index, carried)
        inner.nodes.append(helper.make_node("Identity", [condition], [prefix + "continue"]))
        dims = [None] * rank
        graph = helper.make_graph(
            inner.nodes,
            prefix + "body",
            [
                helper.make_tensor_value_info(index, TensorProto.INT64, []),
                helper.make_tensor_value_info(condition, TensorProto.BOOL, []),
                helper.make_tensor_value_info(carried, TensorProto.FLOAT, dims),
            ],
            [
                helper.make_tensor_value_info(prefix + "continue", TensorProto.BOOL, []),
                helper.make_tensor_value_info(result, TensorProto.FLOAT, dims),
            ],
        )
        return self.Loop(trip_count, self.constant(True, np.bool_), initial, body=graph)

    def choose(
        self,
        condition: Value,
        then: Callable[["FunctionBody"], Value],
        otherwise: Callable[["FunctionBody"], Value],
        rank: int,
    ) -> Value:
        """The float32 tensor of `rank` that one of two branches gives; only that one runs."""
        self._num_subgraphs += 1
        graphs = []
        for name, branch in (("then", then), ("else", otherwise)):
            prefix = f"{self._prefix}{name}{self._num_subgraphs}_"
            inner = FunctionBody(prefix)
            result = branch(inner)
            info = helper.make_tensor_value_info(result, TensorProto.FLOAT, [None] * rank)
            graphs.append(helper.make_graph(inner.nodes, prefix + "body", [], [info]))
        return self.If(condition, then_branch=graphs[0], else_branch=graphs[1])

    def function(
        self, name: str, inputs: Sequence[str], outputs: Sequence[tuple[str, Value]], attributes: Sequence[str] = ()
    ) -> FunctionProto:
        """The function of the collected nodes; `outputs` are pairs of an output's name and the value it has."""
        renamed = [helper.make_node("Identity", [value], [output]) for output, value in outputs]
        return helper.make_function(
            DOMAIN,
            name,
            list(inputs),
            [output for output, _ in outputs],
            [*self.nodes, *renamed],
            [helper.make_opsetid("", OPSET)],
            list(attributes),
        )
