"""The graph ``early_exit`` as it is exported: what the verifiers let through, and its ONNX file in onnxruntime."""

import dataclasses
import json
from pathlib import Path

import onnx
import pytest
import torch
from onnx import helper
from torch import Tensor

import plugins
from kvforge.checkpoint import open_checkpoint
from kvforge.common.errors import BuildError
from kvforge.compiler.convert import convert_weights
from kvforge.compiler.export import export_early_exit, export_upper
from kvforge.compiler.graph_checks import verify
from kvforge.compiler.onnx_check import check_graph
from kvforge.compiler.onnx_export import INPUTS, RESULTS, write_onnx
from kvforge.compiler.options import BuildOptions, ResolvedOptions, resolve
from model_defs import ModelConfig, load_config
from model_defs.reference import reference_early_exit, reference_hidden
from plugins.paged_attention.split_decode import split_decode
from tests.support.models.checkpoints import load_weights, make_checkpoint
from tests.support.onnx.nodes import OnnxSession
from tests.support.onnx.tensorrt_support import unsupported
from tests.support.rounding import assert_near, sum_error


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("early-exit") / "model", "qwen3", cut=1, group_size=2, early_exit=True,
        num_hidden_layers=3, tie_word_embeddings=True, head_dim=32,
    )  # fmt: skip


@pytest.fixture(scope="module")
def config(model: Path) -> ModelConfig:
    return load_config(json.loads((model / "config.json").read_text()))


def options_for(config: ModelConfig, dtype: str = "float32") -> ResolvedOptions:
    return resolve(BuildOptions(target="tensorrt", dtype=dtype, kv_dtype="fp8", page_size=8), config, "F32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_takes_hidden_states_and_touches_no_cache(config: ModelConfig, dtype: str) -> None:
    options = options_for(config, dtype)
    graph = export_early_exit(config, options)
    verify(graph, config, options)
    assert options.graphs == ("lower", "upper", "early_exit") and graph.pool_owners == ()
    assert set(graph.program.state_dict) == {"norm_early_exit.weight", "lm_head_early_exit.weight"}
    assert not graph.program.constants


def test_a_graph_with_operators_or_other_results_is_refused(config: ModelConfig) -> None:
    options = options_for(config)
    upper = dataclasses.replace(export_upper(config, options), name="early_exit")
    with pytest.raises(BuildError, match="which does not belong into this graph"):
        verify(upper, config, options)
    graph = export_early_exit(config, options)
    output = next(node for node in graph.program.graph.nodes if node.op == "output")
    output.args = ((next(node for node in graph.program.graph.nodes if "survivor_index" in node.name),),)
    with pytest.raises(BuildError, match="returns tensors of dtypes"):
        verify(graph, config, options)


@pytest.fixture(scope="module")
def exported(model: Path, config: ModelConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("onnx")
    weights = folder / "weights.safetensors"
    convert_weights(open_checkpoint(model), config, torch.float32, weights)
    write_onnx("early_exit", config, options_for(config), folder / "early_exit.onnx", weights)
    return folder / "early_exit.onnx"


def test_onnxruntime_gives_the_references_logits(model: Path, config: ModelConfig, exported: Path) -> None:
    weights = load_weights(model)
    tokens = torch.randint(3, config.vocab_size, (29,), generator=torch.Generator().manual_seed(2))
    hidden = reference_hidden(config, weights, tokens)[config.cut]
    expected = reference_early_exit(config, weights, tokens)
    session = OnnxSession(str(exported))
    assert (session.inputs, session.outputs) == (list(INPUTS["early_exit"]), list(RESULTS["early_exit"]))
    for survivors in ([28], [3, 4, 5, 28], list(range(29))):
        index = torch.tensor(survivors, dtype=torch.int32)
        logits: Tensor = session.run({"hidden": hidden, "survivor_index": index})["logits"]
        assert_near(logits, expected[survivors], sum_error(config.hidden_size, config.hidden_size))


def test_a_bfloat16_file(config: ModelConfig, model: Path, tmp_path: Path) -> None:
    """Weights, hidden state and GEMM are bf16, the logits float32, as in ``upper``."""
    weights = tmp_path / "weights.safetensors"
    convert_weights(open_checkpoint(model), config, torch.bfloat16, weights)
    write_onnx("early_exit", config, options_for(config, "bfloat16"), tmp_path / "early_exit.onnx", weights)
    graph = onnx.load(tmp_path / "early_exit.onnx", load_external_data=False)
    assert unsupported(graph) == []
    types = {value.name: value.type.tensor_type.elem_type for value in (*graph.graph.input, *graph.graph.output)}
    kinds = onnx.TensorProto
    assert types == {"hidden": kinds.BFLOAT16, "survivor_index": kinds.INT32, "logits": kinds.FLOAT}


def test_its_onnx_file(exported: Path, config: ModelConfig) -> None:
    graph = onnx.load(exported, load_external_data=False)
    assert unsupported(graph) == [] and not graph.functions
    names = {t.name for t in graph.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL}
    assert names == {"norm_early_exit.weight", "lm_head_early_exit.weight"}
    axes = {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*graph.graph.input, *graph.graph.output)
    }
    assert axes == {"hidden": ["tokens", 64], "survivor_index": ["survivors"], "logits": ["survivors", 320]}
    assert split_decode(graph, lambda kv_heads: 4) == 0  # what a plan is built from is the same file
    name = next(iter(plugins.OPERATORS))
    graph.graph.node.append(helper.make_node(name, ["hidden"], ["x"], domain="kvforge"))
    with pytest.raises(BuildError, match=r"ONNX graph early_exit: node .* does not belong into this graph"):
        check_graph(graph, "early_exit", config, options_for(config))
