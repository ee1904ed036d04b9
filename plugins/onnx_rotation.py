"""Rotary position embedding inside ONNX functions."""

from plugins.onnx_body import FunctionBody, Value


def rotate(body: FunctionBody, x: Value, cos: Value, sin: Value) -> Value:
    """Rotates `x` [n, heads, head_dim] float32 by tables [n, 1 or heads, head_dim/2]; element i of a head is paired
    with i + head_dim/2."""
    first, second = body.Split(x, outputs=2, axis=-1, num_outputs=2)
    low = body.Sub(body.Mul(first, cos), body.Mul(second, sin))
    high = body.Add(body.Mul(second, cos), body.Mul(first, sin))
    return body.Concat(low, high, axis=-1)
