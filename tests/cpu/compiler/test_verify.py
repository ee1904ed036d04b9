"""The verifier passes what the compiler exports and names the node that breaks a rule."""

import copy
import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch.fx import GraphModule, Node

from kvforge.common.errors import BuildError
from kvforge.common.graph_nodes import argument
from kvforge.compiler.export import ExportedGraph, export_lower, export_upper, export_verify
from kvforge.compiler.graph_checks import verify
from kvforge.compiler.options import BuildOptions, ResolvedOptions, resolve
from model_defs import ModelConfig, load_config

HF = {
    "model_type": "qwen3_swiftkv",
    "swiftkv": True,
    "num_key_value_layers": 2,
    "key_value_group_size": 2,
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return load_config(HF)


@pytest.fixture(scope="module")
def options(config: ModelConfig) -> ResolvedOptions:
    return resolve(BuildOptions(page_size=4), config, "F32")


@pytest.fixture(scope="module")
def lower(config: ModelConfig, options: ResolvedOptions) -> ExportedGraph:
    """Tests that change it do so in a copy."""
    return export_lower(config, options)


@pytest.fixture(scope="module")
def lower_int8(config: ModelConfig, options: ResolvedOptions) -> ExportedGraph:
    """The same with a cache in 8 bits and its scales."""
    return export_lower(config, with_cache(options, "int8"))


def operator_nodes(graph: ExportedGraph, name: str) -> list[Node]:
    return [node for node in graph.program.graph.nodes if node.op == "call_function" and name in str(node.target)]


STATIC = ((0.1, 0.2), (0.3, 0.4), (0.5, 0.6), (0.7, 0.8))


def with_cache(options: ResolvedOptions, kv_dtype: str) -> ResolvedOptions:
    scales = STATIC if kv_dtype.endswith("_static") else ()
    return dataclasses.replace(options, kv_dtype=kv_dtype, kv_scales=scales)


@pytest.mark.parametrize("kv_dtype", ["float32", "fp8", "int8_static"])
def test_exported_graphs_write_each_owner_once_and_read_its_layers(kv_dtype: str, config: ModelConfig, options) -> None:
    options = with_cache(options, kv_dtype)
    lower, upper = export_lower(config, options), export_upper(config, options)
    verify(lower, config, options)
    verify(upper, config, options)
    assert len(operator_nodes(lower, "rope_paged_kv_write")) == 4  # layers 0, 1 and leaders 2, 4
    assert len(operator_nodes(lower, "paged_attention")) == 2
    assert len(operator_nodes(upper, "rope_paged_kv_write")) == 0
    assert len(operator_nodes(upper, "paged_attention")) == 3


def test_key_value_projections_above_the_cut_are_one_gemm(lower: ExportedGraph) -> None:
    """Below the cut 2 layers x (qkv, o, gate_up, down); above it a single linear for all owners."""
    assert len(operator_nodes(lower, "aten.linear")) == 2 * 4 + 1


@pytest.mark.parametrize("is_packed", [True, False])
def test_linears_are_packed_where_the_options_say_so_and_nowhere_else(is_packed: bool, config: ModelConfig) -> None:
    options = [resolve(BuildOptions(page_size=4, weight_dtype=name), config, "F32") for name in ("int8", "auto")]
    lower = export_lower(config, options[0] if is_packed else options[1])
    assert len(operator_nodes(lower, "packed_linear")) == (2 * 4 + 1 if is_packed else 0)
    with pytest.raises(BuildError, match=r"node \w+ calls .*, but weights are packed as"):
        verify(lower, config, options[1] if is_packed else options[0])
    if is_packed:
        verify(lower, config, options[0])


def write_twice(graph: ExportedGraph) -> None:
    node = operator_nodes(graph, "rope_paged_kv_write")[0]
    with graph.program.graph.inserting_after(node):
        graph.program.graph.call_function(node.target, node.args)


def swap_pools(graph: ExportedGraph) -> None:
    node = operator_nodes(graph, "paged_attention")[0]
    node.args = (node.args[0], node.args[2], node.args[1], *node.args[3:])


def read_another_owner(graph: ExportedGraph) -> None:
    first, second = operator_nodes(graph, "paged_attention")[:2]
    second.args = (second.args[0], *first.args[1:3], *second.args[3:])


def read_before_write(graph: ExportedGraph) -> None:
    write, read = operator_nodes(graph, "rope_paged_kv_write")[0], operator_nodes(graph, "paged_attention")[0]
    read.append(write)


def drop_a_write(graph: ExportedGraph) -> None:
    graph.program.graph.erase_node(operator_nodes(graph, "rope_paged_kv_write")[-1])


def unknown_operator(graph: ExportedGraph) -> None:
    node = operator_nodes(graph, "aten.linear")[0]
    node.target = torch.ops.quantized.linear.default


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (write_twice, "a second time"),
        (swap_pools, "does not take the K and the V pool"),
        (read_another_owner, "reads the caches of layers"),
        (read_before_write, "before this step's K and V are written"),
        (drop_a_write, "writes [0, 1, 2]"),
        (unknown_operator, "which no target implements"),
    ],
)
def test_a_damaged_graph_is_refused(
    damage: Callable[[ExportedGraph], None],
    sentence: str,
    lower: ExportedGraph,
    config: ModelConfig,
    options: ResolvedOptions,
) -> None:
    graph = copy.deepcopy(lower)
    assert isinstance(graph.program.graph_module, GraphModule)
    damage(graph)
    with pytest.raises(BuildError) as error:
        verify(graph, config, options)
    assert sentence in str(error.value) and str(error.value).startswith("Graph lower")


def test_a_cache_of_another_dtype_is_refused(lower: ExportedGraph, config: ModelConfig) -> None:
    other = resolve(BuildOptions(page_size=4, kv_dtype="bf16"), config, "F32")
    with pytest.raises(BuildError, match="cache pool of dtype"):
        verify(lower, config, other)


def swap_scale_pools(graph: ExportedGraph) -> None:
    node = operator_nodes(graph, "rope_paged_kv_write")[0]
    node.args = (*node.args[:7], node.args[8], node.args[7], *node.args[9:])


def drop_scale_pools(graph: ExportedGraph) -> None:
    node = operator_nodes(graph, "paged_attention")[-1]
    node.args = node.args[:8]


def read_another_owners_scales(graph: ExportedGraph) -> None:
    first, second = operator_nodes(graph, "paged_attention")[:2]
    second.args = (*second.args[:8], *first.args[8:])


@pytest.mark.parametrize("damage", [swap_scale_pools, drop_scale_pools, read_another_owners_scales])
def test_scale_pools_out_of_place_are_refused(
    damage: Callable[[ExportedGraph], None], lower_int8: ExportedGraph, config: ModelConfig, options: ResolvedOptions
) -> None:
    options = with_cache(options, "int8")
    verify(lower_int8, config, options)
    graph = copy.deepcopy(lower_int8)
    damage(graph)
    with pytest.raises(BuildError, match="does not take the K and the V pool with their scales of one owner"):
        verify(graph, config, options)


@pytest.mark.parametrize("name", ["rope_paged_kv_write", "paged_attention"])
def test_keys_that_are_not_rotated_as_the_others_are_refused(
    name: str, lower_int8: ExportedGraph, config: ModelConfig, options: ResolvedOptions
) -> None:
    graph = copy.deepcopy(lower_int8)
    node = operator_nodes(graph, name)[1]
    assert argument(node, "rotates_keys") is True
    node.args = tuple(value for value in node.args if value is not True)
    node.kwargs = {key: value for key, value in node.kwargs.items() if value is not True}
    with pytest.raises(BuildError, match="does not rotate the keys of layer 1"):
        verify(graph, config, with_cache(options, "int8"))


def test_another_owners_static_scale_is_refused(config: ModelConfig, options: ResolvedOptions) -> None:
    options = with_cache(options, "fp8_static")
    graph = export_upper(config, options)
    verify(graph, config, options)
    other = dataclasses.replace(options, kv_scales=(*STATIC[:3], (0.7, 0.9)))
    with pytest.raises(BuildError, match=r"takes \(0.7, 0.8\) as the scales of layer 4"):
        verify(graph, config, other)


def test_a_graph_of_another_kind_is_refused(config: ModelConfig, options: ResolvedOptions) -> None:
    graph = export_verify(config, options)
    verify(graph, config, options)
    with pytest.raises(BuildError, match="which does not belong into this graph"):
        verify(dataclasses.replace(graph, name="upper"), config, options)
