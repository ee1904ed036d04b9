"""TensorRT plugins LandmarkSelectScores and LandmarkSelectChoose; outliers are int8, which TensorRT's plugins take."""

from collections.abc import Mapping

import torch

from plugins.landmark_select import OPERATOR
from plugins.triton_kernel import KernelSpec
from plugins.trt_cache import FLOATS
from plugins.trt_plugin import Attributes, Outputs, PluginDefinition, SymbolicTensor, Tensors


def _scores(inputs: Mapping[str, SymbolicTensor], attributes: Attributes) -> Outputs:
    sequences, heads = inputs["num_chunks"].shape[0], inputs["q"].shape[1]
    total = inputs["table"].shape[1] * inputs["landmarks"].shape[1]
    return (SymbolicTensor(torch.float32, (sequences, heads, total)),)


def _scores_spec(tensors: Tensors, attributes: Attributes, capability: int) -> KernelSpec:
    from plugins.landmark_select.cuda import scores_spec

    q, landmarks = tensors["q"], tensors["landmarks"]
    return scores_spec(q.dtype, landmarks.size(1), landmarks.size(2), q.size(1), landmarks.size(3), attributes["scale"])


def _selected(inputs: Mapping[str, SymbolicTensor], attributes: Attributes) -> Outputs:
    shape = (inputs["num_chunks"].shape[0], attributes["kv_heads"], attributes["max_selected"])
    return (SymbolicTensor(torch.int32, shape),)


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
        attributes=OPERATOR.typed("scale"),
    ),
    PluginDefinition(
        name="LandmarkSelectChoose",
        inputs=("scores", *OPERATOR.tensors[-2:]),
        outputs=_selected,
        num_outputs=1,
        types=((_F32, _I32, _I32, _I32),),
        spec=_choose_spec,
        attributes=(("kv_heads", int), *OPERATOR.typed("max_selected")),
    ),
)
