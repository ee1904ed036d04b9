"""TensorRT plugins LandmarkSelectScores and LandmarkSelectChoose; outliers are int8, which TensorRT's plugins take."""

from collections.abc import Mapping
from typing import Any

import torch

from plugins.landmark_select import OPERATOR
from plugins.triton_kernel import KernelSpec
from plugins.trt_cache import FLOATS
from plugins.trt_plugin import Attributes, PluginDefinition, Tensors


def _scores(inputs: Mapping[str, Any], attributes: Attributes) -> tuple[Any, ...]:
    import tensorrt as trt
    import tensorrt.plugin as trtp

    sequences, heads = inputs["num_chunks"].shape_expr[0], inputs["q"].shape_expr[1]
    total = inputs["table"].shape_expr[1] * inputs["landmarks"].shape_expr[1]
    return (trtp.from_shape_expr((sequences, heads, total), trt.DataType.FLOAT),)


def _scores_spec(tensors: Tensors, attributes: Attributes, capability: int) -> KernelSpec:
    from plugins.landmark_select.cuda import scores_spec

    q, landmarks = tensors["q"], tensors["landmarks"]
    return scores_spec(q.dtype, landmarks.size(1), landmarks.size(2), q.size(1), landmarks.size(3), attributes["scale"])


def _selected(inputs: Mapping[str, Any], attributes: Attributes) -> tuple[Any, ...]:
    import tensorrt as trt
    import tensorrt.plugin as trtp

    shape = (inputs["num_chunks"].shape_expr[0], attributes["kv_heads"], attributes["max_selected"])
    return (trtp.from_shape_expr(shape, trt.DataType.INT32),)


def _choose_spec(tensors: Tensors, attributes: Attributes, capability: int) -> KernelSpec:
    from plugins.landmark_select.cuda import choose_spec

    return choose_spec(attributes["kv_heads"], tensors["scores"].size(1), attributes["max_selected"])


_F32, _I32 = torch.float32, torch.int32

PLUGINS = (
    PluginDefinition(
        name="LandmarkSelectScores",
        inputs=OPERATOR.tensors[:-1],
        outputs=_scores,
        num_outputs=1,
        types=tuple((x, x, torch.int8, _I32, _I32, _I32, _F32) for x in FLOATS),
        spec=_scores_spec,
        attributes=OPERATOR.attributes[:1],
    ),
    PluginDefinition(
        name="LandmarkSelectChoose",
        inputs=("scores", *OPERATOR.tensors[-2:]),
        outputs=_selected,
        num_outputs=1,
        types=((_F32, _I32, _I32, _I32),),
        spec=_choose_spec,
        attributes=(("kv_heads", int), *OPERATOR.attributes[1:]),
    ),
)
