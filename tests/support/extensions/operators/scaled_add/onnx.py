"""ScaledAdd as an ONNX function."""

from onnx import FunctionProto
from plugins.scaled_add import OPERATOR

from plugins.onnx_body import FunctionBody
from plugins.onnx_node import Cache, OnnxNode


def _body(cache: Cache) -> FunctionProto:
    body = FunctionBody()
    result = body.Add("x", body.Mul("y", body.float_attribute("scale")))
    return body.function("ScaledAdd", OPERATOR.tensors, [("sum", result)], ("scale",))


NODES = (
    OnnxNode(name="ScaledAdd", inputs=OPERATOR.tensors, outputs=("sum",), body=_body, attributes=OPERATOR.attributes),
)
