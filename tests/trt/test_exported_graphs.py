"""Exported ONNX files as the builder would meet them: profiles for all inputs, a plugin for every node of ours.

Contract tests: each plugin is asked what the builder asks, with the node's own attributes; nothing is built.
"""

from pathlib import Path

import onnx
import pytest
import torch
from onnx import helper

from kvforge.compiler.tensorrt_profiles import PROFILES, input_ranges
from plugins.paged_attention.split_decode import split_decode
from plugins.paged_attention.trt import num_splits
from plugins.trt_case import Dynamic, NetworkTensor
from plugins.trt_plugins import PLUGINS, register_plugins
from plugins.trt_target import compile_for
from tests.support.onnx.engine import ExportedEngine, OnnxCase, export_case
from tests.trt.aot_driver import ask

MODELS = {
    "static fp8": OnnxCase("llama", 1, 1, "fp8_static", "bfloat16", (("num_hidden_layers", 3),)),
    "dynamic int8": OnnxCase("qwen3", 1, 2, "int8", "bfloat16", (("num_hidden_layers", 3),)),
    "float, no cut": OnnxCase("mistral", None, 1, "bfloat16", "bfloat16", (("num_hidden_layers", 2),)),
}
GRAPHS = ("lower", "upper", "verify")
TYPES = {
    onnx.TensorProto.BFLOAT16: torch.bfloat16,
    onnx.TensorProto.FLOAT8E4M3FN: torch.float8_e4m3fn,
    onnx.TensorProto.INT8: torch.int8,
    onnx.TensorProto.FLOAT: torch.float32,
}


of_the_first = pytest.mark.with_full(engine=[*MODELS][1:])


@pytest.fixture(scope="module", params=MODELS)
def engine(request) -> ExportedEngine:
    return export_case(MODELS[request.param], GRAPHS)


def shape_of(value: onnx.ValueInfoProto) -> tuple[int, ...]:
    dims = value.type.tensor_type.shape.dim
    return tuple(dim.dim_value if dim.HasField("dim_value") else -1 for dim in dims)


@of_the_first
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("profile", PROFILES)
def test_every_input_has_its_range(engine, graph, profile):
    model = onnx.load(engine.file(graph), load_external_data=False)
    assert model.graph.input
    for value in model.graph.input:
        ranges = input_ranges(graph, value.name, shape_of(value), engine.options, profile)
        assert all(r.minimum <= r.optimum <= r.maximum for r in ranges)


def pool_tensor(model: onnx.ModelProto, name: str) -> NetworkTensor:
    """The graph's pool input of this kind; all owners' are alike."""
    value = next(value for value in model.graph.input if value.name.startswith(name))
    shape = tuple(Dynamic(9) if size < 0 else size for size in shape_of(value))
    return NetworkTensor(TYPES[value.type.tensor_type.elem_type], shape)


def tensors(engine: ExportedEngine, model: onnx.ModelProto, operator: str) -> list[NetworkTensor]:
    """The plugin's inputs in a network of this model: seven tokens of three sequences."""
    config, dtype = engine.config, engine.options.torch_dtype
    tokens, sequences = Dynamic(7), Dynamic(3)
    drafts, rows, vocab = Dynamic(4), Dynamic(7), config.vocab_size
    known = {
        "q": NetworkTensor(dtype, (tokens, config.num_heads, config.head_dim)),
        **dict.fromkeys(("k", "v"), NetworkTensor(dtype, (tokens, config.num_kv_heads, config.head_dim))),
        **dict.fromkeys(("cos", "sin"), NetworkTensor(torch.float32, (tokens, config.head_dim // 2))),
        "slot_mapping": NetworkTensor(torch.int32, (tokens,)),
        **dict.fromkeys(("query_start", "draft_start"), NetworkTensor(torch.int32, (Dynamic(4),))),
        "kv_length": NetworkTensor(torch.int32, (sequences,)),
        "page_table": NetworkTensor(torch.int32, (sequences, Dynamic(5))),
        "partial": NetworkTensor(torch.float32, (sequences, config.num_heads, 64, config.head_dim + 2)),
        "logits": NetworkTensor(torch.float32, (rows, vocab)),
        "draft_ids": NetworkTensor(torch.int32, (drafts,)),
        "draft_probs": NetworkTensor(torch.float32, (drafts, vocab)),
        "temperature": NetworkTensor(torch.float32, (sequences,)),
        "uniform": NetworkTensor(torch.float32, (rows, 2)),
    }
    names = PLUGINS[operator].inputs
    return [known[name] if name in known else pool_tensor(model, name) for name in names]


@of_the_first
@pytest.mark.parametrize("split", (False, True), ids=("one kernel", "split"))
@pytest.mark.parametrize("graph", GRAPHS)
def test_a_plugin_for_every_node(trt, monkeypatch, engine, graph, split):
    register_plugins()
    model = onnx.load(engine.file(graph), load_external_data=False)
    layers = {"lower": engine.config.cut, "upper": engine.config.num_layers - engine.config.cut, "verify": 0}[graph]
    if split:
        assert split_decode(model, num_splits) == layers
    asked = set()
    for node in model.graph.node:
        if node.domain != "kvforge":
            assert node.domain == "" and node.op_type not in PLUGINS
            continue
        attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        assert (attributes.pop("plugin_namespace"), attributes.pop("plugin_version")) == (b"kvforge", b"1")
        if (node.op_type, *attributes.items()) in asked:
            continue
        asked.add((node.op_type, *attributes.items()))
        inputs = tensors(engine, model, node.op_type)
        with compile_for(90):
            answers = ask(trt, monkeypatch, node.op_type, inputs, attributes)
        assert len(node.input) == len(inputs) and len(node.output) == len(answers.outputs)
        assert answers.combinations.count((*(t.dtype for t in inputs), *(dtype for dtype, _ in answers.outputs))) == 1
    kinds = {name for name, *_ in asked}
    assert ("SpeculativeVerify" in kinds) == (graph == "verify")
    assert any(kind.startswith("RopePagedKvWrite") for kind in kinds) == (graph == "lower")
    expected = ("Partial", "Combine") if split else ("",)
    assert sum(kind.startswith("PagedAttention") for kind in kinds) == (len(expected) if layers else 0)


@of_the_first
def test_weights_stay_in_their_file(engine: ExportedEngine):
    """The rewritten file is written beside the original and refers to the same weights."""
    model = onnx.load(engine.file("lower"), load_external_data=False)
    split_decode(model, num_splits)
    external = [t for t in model.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]
    assert external
    for tensor in external:
        location = {entry.key: entry.value for entry in tensor.external_data}["location"]
        assert (engine.folder / Path(location)).is_file()
