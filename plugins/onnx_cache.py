"""The KV cache inside ONNX functions: 8-bit formats and the two ways to get at a pool's elements.

Of the standard operators only Cast and a few others take e4m3, so pools of it are converted to float16 and back, whole
and exactly. int8 pools are gathered and scattered as they are.
"""

from collections.abc import Callable

import numpy as np
from onnx import TensorProto

from plugins.kv_quantization import SMALLEST_SCALE
from plugins.onnx_body import FunctionBody, Value
from plugins.onnx_node import Cache
from plugins.onnx_pairs import in_pairs

FLOAT = TensorProto.FLOAT
LARGEST = {Cache.E4M3: 448.0, Cache.INT8: 127.0, Cache.INT4: 7.0}


def readable(body: FunctionBody, pool: Value, cache: Cache) -> Value:
    """The pool in a dtype that can be gathered from."""
    return body.to(pool, TensorProto.FLOAT16) if cache is Cache.E4M3 else pool


def writable(body: FunctionBody, pool: Value, cache: Cache) -> tuple[Value, Callable[[Value], Value]]:
    """The pool in a dtype that can be scattered into, and the way back."""
    if cache is not Cache.E4M3:
        return pool, lambda result: result
    return body.to(pool, TensorProto.FLOAT16), lambda result: body.to(result, TensorProto.FLOAT8E4M3FN)


def row_scale(body: FunctionBody, x: Value, cache: Cache) -> Value:
    """max|x| / the largest stored magnitude over the last dimension, kept with size 1, and at least 2**-126; NaN where
    the row has one."""
    scale = body.Max(
        body.Div(body.largest(body.Abs(x)), body.constant(LARGEST[cache], np.float32)),
        body.constant(SMALLEST_SCALE, np.float32),
    )
    has_nan = body.largest(body.to(body.IsNaN(x), TensorProto.INT32))
    return body.Where(body.to(has_nan, TensorProto.BOOL), body.constant(np.nan, np.float32), scale)


def quantize(body: FunctionBody, x: Value, scale: Value, cache: Cache) -> Value:
    """x / scale saturated and rounded half to even: int8, bytes of two int4, or the float16 that holds the e4m3 number.

    A NaN stays one in e4m3 and becomes 0 in integers.
    """
    scaled = body.Div(x, scale)
    if cache is Cache.E4M3:
        return body.to(body.to(scaled, TensorProto.FLOAT8E4M3FN), TensorProto.FLOAT16)
    limit = LARGEST[cache]
    bounded = body.Clip(scaled, body.constant(-limit, np.float32), body.constant(limit, np.float32))
    number = body.Where(body.IsNaN(scaled), body.constant(0.0, np.float32), bounded)
    codes = body.to(body.Round(number), TensorProto.INT8)
    return in_pairs(body, codes) if cache is Cache.INT4 else codes
