"""What TensorRT's ONNX parser supports, as its documentation lists it, and a check of a model's nodes against that.

Source: the operator support matrix of the ONNX parser (docs/operators.md of onnx-tensorrt, release 10.15, the newest
that is at hand as text) and the range of opsets of release 11. Function bodies are not checked: a plugin of a node's
name takes precedence over its function.
"""

from collections.abc import Iterator

from onnx import ModelProto, NodeProto, TensorProto, helper

OPSETS = range(9, 26)

_FLOATS = frozenset({"FLOAT", "FLOAT16", "BFLOAT16"})
_NUMBERS = _FLOATS | {"INT32", "INT64"}
_ANY = _NUMBERS | {"BOOL"}
_CASTS = _ANY | {"UINT8"}
_CONSTANTS = _ANY | {"FLOAT8E4M3FN", "FLOAT4E2M1", "INT4"}

_BY_TYPES: dict[frozenset[str], str] = {
    _FLOATS: (
        "Acos Acosh Asin Asinh Atan Atanh AveragePool BatchNormalization Ceil Celu Clip Conv ConvTranspose Cos Cosh "
        "CumSum Dropout Einsum Elu Erf Exp Floor Gemm GlobalAveragePool GlobalLpPool GlobalMaxPool GroupNormalization "
        "GRU HardSigmoid HardSwish Hardmax InstanceNormalization IsInf LayerNormalization LeakyRelu Log LogSoftmax "
        "LRN LSTM LpNormalization LpPool MatMul MaxPool MeanVarianceNormalization PRelu QuantizeLinear RandomNormal "
        "RandomNormalLike RandomUniform RandomUniformLike Reciprocal Resize RMSNormalization RNN RotaryEmbedding Round "
        "Scan Selu Sigmoid Sin Sinh Softmax Softplus Softsign Sqrt Tan Tanh ThresholdedRelu Upsample"
    ),
    _NUMBERS: (
        "Abs Add ArgMax ArgMin DepthToSpace Div Equal Greater GreaterOrEqual IsNaN Less LessOrEqual Max Min Mod Mul "
        "Neg Pad Pow Range ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd "
        "ReduceSum ReduceSumSquare Relu Scatter ScatterElements ScatterND Shrink Sign SpaceToDepth Sub Sum TopK"
    ),
    _ANY: (
        "Concat Expand EyeLike Flatten Gather GatherElements GatherND Identity If Loop OneHot Reshape ReverseSequence "
        "Shape Size Slice Split Squeeze Tile Transpose Trilu Unsqueeze Where"
    ),
    _CASTS: "Cast CastLike",
    _CONSTANTS: "Constant ConstantOfShape",
    frozenset({"BOOL"}): "And Not Or Xor",
    frozenset({"FLOAT", "FLOAT16"}): "Mish NonMaxSuppression NonZero RoiAlign",
}
TYPES: dict[str, frozenset[str]] = {name: types for types, names in _BY_TYPES.items() for name in names.split()}
"""The types of data that each operator takes."""

CONSTANT_INPUTS = {
    **{name: 1 for name in TYPES if name.startswith("Reduce")},
    "CumSum": 1,
    "OneHot": 1,
    "Squeeze": 1,
    "TopK": 1,
    "Unsqueeze": 1,
}
"""The input of an operator that has to be known when the engine is built."""

REQUIRED_ATTRIBUTES = {"ScatterND": {"reduction": b"none"}, "TopK": {"sorted": 1}}
"""Values that attributes must have where they are given."""

FIRST_OUTPUT_ONLY = ("LayerNormalization",)


def unsupported(model: ModelProto) -> list[str]:
    """Return a line for everything in the graph that TensorRT's parser would refuse; our nodes become plugins."""
    opset = next(entry.version for entry in model.opset_import if entry.domain == "")
    problems = [] if opset in OPSETS else [f"opset {opset}"]
    graph = model.graph
    types = {value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.output, *graph.value_info)}
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    constants = {tensor.name for tensor in graph.initializer}
    constants |= {node.output[0] for node in graph.node if node.op_type == "Constant"}
    for node in graph.node:
        if node.domain == "":
            problems += [f"{node.op_type} {node.name}: {problem}" for problem in _problems(node, types, constants)]
    return problems


def _problems(node: NodeProto, types: dict[str, int], constants: set[str]) -> Iterator[str]:
    if node.op_type not in TYPES:
        yield "not supported"
        return
    for place, name in enumerate(name for name in (*node.input, *node.output) if name):
        kind = TensorProto.DataType.Name(types[name])
        if kind not in (TYPES[node.op_type] if place == 0 else _CASTS):
            yield f"{name} is {kind}"
    constant = CONSTANT_INPUTS.get(node.op_type)
    if constant is not None and len(node.input) > constant and node.input[constant] not in constants:
        yield f"input {constant} is not constant"
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    for name, value in REQUIRED_ATTRIBUTES.get(node.op_type, {}).items():
        if attributes.get(name, value) != value:
            yield f"{name} is {attributes[name]!r}"
    if node.op_type in FIRST_OUTPUT_ONLY and len(node.output) > 1:
        yield "has a second output"
    if node.op_type == "Constant" and not {"value", "value_int", "value_ints", "value_float", "value_floats"} & set(
        attributes
    ):
        yield "is not a tensor of numbers"
