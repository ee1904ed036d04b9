"""LowRankKeyReconstruct as an ONNX function: one product per sequence and head, then the rotation of all keys."""

import numpy as np
from onnx import FunctionProto

from plugins.low_rank_key_reconstruct import OPERATOR
from plugins.onnx_body import Body, Value
from plugins.onnx_cache import FLOAT
from plugins.onnx_node import Cache, OnnxNode
from plugins.onnx_rotation import rotate


def _body(cache: Cache) -> FunctionProto:
    body = Body()
    zero, one = body.constant(0), body.constant(1)
    starts, rows, positions = (body.to_int64(name) for name in ("selected_start", "rows", "positions"))
    present = body.GreaterOrEqual(rows, zero)
    row, position = (body.Where(present, x, zero) for x in (rows, positions))

    active = body.nonempty(starts)

    def sequence(inner: Body, i: Value, keys: Value) -> Value:
        s = inner.Gather(active, i)
        selected = inner.rows(row, inner.Gather(starts, s), inner.Gather(starts, inner.Add(s, one)))
        factor = inner.to(inner.Gather("u", inner.Transpose(selected, perm=[1, 0])), FLOAT)
        product = inner.MatMul(factor, inner.to(inner.Gather("sv", s), FLOAT))
        return inner.Concat(keys, inner.Transpose(product, perm=[1, 0, 2]), axis=0)

    shape = body.shape(0, body.size("sv", 1), body.size("sv", 3))
    nothing = body.Expand(body.constant(0.0, np.float32), shape)
    keys = body.loop(body.size(active, 0), nothing, 3, sequence)
    rotated = rotate(body, keys, body.Gather("cos", position), body.Gather("sin", position))
    kept = body.Where(body.Unsqueeze(present, body.constant([2])), rotated, body.constant(0.0, np.float32))
    return body.function("LowRankKeyReconstruct", OPERATOR.tensors, [("keys", body.CastLike(kept, "u"))])


NODES = (OnnxNode(name="LowRankKeyReconstruct", inputs=OPERATOR.tensors, outputs=("keys",), body=_body),)
