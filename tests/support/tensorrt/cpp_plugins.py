"""What TensorRT for RTX says of the C++ library of plugins, and what it builds with it."""

import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from plugins.trt_cpp import Use, compile_library
from plugins.trt_launch import launches
from plugins.trt_plugin import NAMESPACE, InputTensor, torch_dtype
from plugins.trt_plugins import PLUGINS
from tests.support.tensorrt.descriptions import dtype_name, one_node, step
from tests.support.tensorrt.plans import kernels_in

CAPABILITY = 90


def answer(trt: ModuleType, question: dict[str, Any]) -> list[dict[str, Any]]:
    """What `ask_rtx` asks: of each case fields and outputs, and of the first with each kernel the plan's kernels.

    The library is compiled against `headers`, with the kernels of all `cases`.
    """
    cases = question["cases"]
    uses = {}
    for case in cases:
        key = (case["plugin"], str(_constant(case)), str(case["attributes"]))
        uses.setdefault(key, _use(case))
    with tempfile.TemporaryDirectory() as temporary:
        library = Path(temporary) / "libkvforge_plugins.so"
        compile_library(Path(question["headers"]), library, list(uses.values()))
        registry = trt.get_plugin_registry()
        handle = registry.load_library(str(library))
        assert handle is not None
        builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
        answers, built = [], set()
        for case in cases:
            described = _describe(trt, builder, case)
            key = (case["plugin"], str(_constant(case)), str(case["attributes"]))
            if key not in built:
                built.add(key)
                described["kernels"] = _built(trt, builder, case)
            answers.append(described)
    return answers


def _inputs(case: dict[str, Any]) -> list[tuple[torch.dtype, list[Any]]]:
    return [(getattr(torch, name), shape) for name, shape in case["inputs"]]


def _constant(case: dict[str, Any]) -> list[Any]:
    return [(name, [-1 if isinstance(size, list) else size for size in shape]) for name, shape in case["inputs"]]


def _use(case: dict[str, Any]) -> Use:
    definition = PLUGINS[case["plugin"]]
    tensors = {
        name: InputTensor(getattr(torch, dtype), tuple(shape))
        for name, (dtype, shape) in zip(definition.inputs, _constant(case), strict=True)
    }
    return Use(definition, tensors, case["attributes"], launches(definition, tensors, case["attributes"], [CAPABILITY]))


def _network(trt: ModuleType, builder: Any, case: dict[str, Any], dynamic: bool) -> tuple[Any, Any]:
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, builder.logger)
    assert parser.parse(one_node(case, _inputs(case), dynamic).SerializeToString()), str(parser.get_error(0))
    return network, parser


def _describe(trt: ModuleType, builder: Any, case: dict[str, Any]) -> dict[str, Any]:
    network, _ = _network(trt, builder, case, dynamic=False)
    outputs = [network.get_output(index) for index in range(network.num_outputs)]
    creator = trt.get_plugin_registry().get_creator(case["plugin"], "1", NAMESPACE)
    return {
        "fields": [field.name for field in creator.field_names],
        "outputs": [[dtype_name(torch_dtype(tensor.dtype)), list(tensor.shape)] for tensor in outputs],
    }


def _built(trt: ModuleType, builder: Any, case: dict[str, Any]) -> list[list[dict[str, Any]]]:
    network, _ = _network(trt, builder, case, dynamic=True)
    config = builder.create_builder_config()
    config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    profile = builder.create_optimization_profile()
    for index, (_, shape) in enumerate(_inputs(case)):
        profile.set_shape(network.get_input(index).name, *(step(shape),) * 3)
    config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    assert plan is not None, case
    return kernels_in(bytes(plan))
