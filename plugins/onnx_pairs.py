"""The int4 cache inside ONNX functions: rotated heads, two numbers in a byte."""

import numpy as np
from onnx import TensorProto

from plugins.onnx_body import FunctionBody, Value


def rotate_blocks(body: FunctionBody, x: Value, head_dim: Value) -> Value:
    """`x` `[..., head_dim]` float32 as `plugins.kv_rotation.rotate_blocks` gives it, with its bits: pairs by strides 1,
    2, 4, …, one for each turn of a loop."""
    double, two = TensorProto.DOUBLE, body.constant(2)
    size = body.BitwiseAnd(head_dim, body.Neg(head_dim))
    ratio = body.Div(body.Log(body.to(size, double)), body.constant(np.log(2.0), np.float64))
    turns = body.to_int64(body.Round(ratio))

    def turn(inner: FunctionBody, i: Value, flat: Value) -> Value:
        pairs = inner.Reshape(flat, inner.shape(-1, 2, inner.Pow(two, i)))
        first, second = inner.Split(pairs, outputs=2, axis=1, num_outputs=2)
        joined = inner.Concat(inner.Add(first, second), inner.Sub(first, second), axis=1)
        return inner.Reshape(joined, inner.constant([-1]))

    shape = body.Shape(x)
    flat = body.loop(turns, body.Reshape(x, body.constant([-1])), 1, turn)
    factor = body.to(body.Reciprocal(body.Sqrt(body.to(size, double))), TensorProto.FLOAT)
    return body.Reshape(body.Mul(flat, factor), shape, allowzero=1)


def in_pairs(body: FunctionBody, codes: Value) -> Value:
    """Codes `[..., head_dim]` int8 as bytes `[..., head_dim/2]` uint8, the even one in the lower half."""
    halves = body.Mod(body.to(codes, TensorProto.INT32), body.constant(16, np.int32))
    even, odd = _split(body, halves, body.constant([0]), body.constant([1]))
    both = body.Add(even, body.Mul(odd, body.constant(16, np.int32)))
    return body.to(both, TensorProto.UINT8)


def _split(body: FunctionBody, x: Value, first: Value, second: Value) -> tuple[Value, Value]:
    """Every other element along the last dimension, from the first and from the second on."""
    end, axis, step = body.constant([2**62]), body.constant([-1]), body.constant([2])
    return body.Slice(x, first, end, axis, step), body.Slice(x, second, end, axis, step)


def out_of_pairs(body: FunctionBody, pairs: Value) -> Value:
    """The numbers `[..., head_dim]` float32 of bytes `[..., head_dim/2]` uint8."""
    last, sixteen = body.constant([-1]), body.constant(16, np.int32)
    stored = body.to(pairs, TensorProto.INT32)
    low, high = body.Mod(stored, sixteen), body.Div(stored, sixteen)
    split = body.Concat(body.Unsqueeze(low, last), body.Unsqueeze(high, last), axis=-1)
    leading = body.Slice(body.Shape(pairs), body.constant([0]), last)
    width = body.Mul(body.Shape(pairs, start=-1), body.constant([2]))
    codes = body.Reshape(split, body.Concat(leading, width, axis=0), allowzero=1)
    signed = body.Where(body.Greater(codes, body.constant(7, np.int32)), body.Sub(codes, sixteen), codes)
    return body.to(signed, TensorProto.FLOAT)
