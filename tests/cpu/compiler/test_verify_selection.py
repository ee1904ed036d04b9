"""The verifier passes the graphs that select chunks and names the node that breaks a rule."""

import copy
import dataclasses
from collections.abc import Callable

import pytest
from torch.fx import Node

from kvforge.common.errors import BuildError
from kvforge.compiler.export import ExportedGraph, export_lower, export_upper
from kvforge.compiler.graph_checks import verify
from kvforge.compiler.options import BuildOptions, ResolvedOptions, resolve
from kvforge.kv_policies import Full, parse
from kvforge.kv_policies.shadowkv import ShadowKV
from model_defs import ModelConfig, load_config

HF = {
    "model_type": "qwen2_swiftkv",
    "swiftkv": True,
    "num_key_value_layers": 1,
    "key_value_group_size": 2,
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
POLICY = "shadowkv:rank=6,chunk_size=2,sparse_budget=8,num_outlier_chunks=1,num_local_tokens=4"


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return load_config(HF)


@pytest.fixture(scope="module")
def options(config: ModelConfig) -> ResolvedOptions:
    return resolve(BuildOptions(page_size=4, kv_policy=POLICY), config, "F32")


@pytest.fixture(scope="module")
def lower(config: ModelConfig, options: ResolvedOptions) -> ExportedGraph:
    return export_lower(config, options)


@pytest.fixture(scope="module")
def upper(config: ModelConfig, options: ResolvedOptions) -> ExportedGraph:
    return export_upper(config, options)


def nodes(graph: ExportedGraph, name: str) -> list[Node]:
    return [node for node in graph.program.graph.nodes if node.op == "call_function" and name in str(node.target)]


def test_each_layer_selects_for_itself(
    lower: ExportedGraph, upper: ExportedGraph, config: ModelConfig, options: ResolvedOptions
) -> None:
    for graph, num_layers in ((lower, 1), (upper, 3)):
        verify(graph, config, options)
        assert [len(nodes(graph, name.split("::")[1])) for name in ShadowKV.operators] == [num_layers] * 3
    assert {name for name in lower.program.state_dict if "rope" in name} == {"rope_cos", "rope_sin"}
    assert lower.program.state_dict["rope_cos"].shape == (64, 4)


def test_a_model_without_a_cut(options: ResolvedOptions) -> None:
    """Its upper graph has no layers, and takes the inputs all the same."""
    config = load_config({**HF, "num_hidden_layers": 1})
    for export in (export_lower, export_upper):
        verify(export(config, options), config, options)
    upper = export_upper(config, options)
    assert len(upper.program.graph_signature.user_inputs) == 6 + 4 and not nodes(upper, "kvforge")


def drop_the_writes(graph: ExportedGraph) -> None:
    graph.program.graph.erase_node(nodes(graph, "selected_kv_write")[1])


def select_after_reading(graph: ExportedGraph) -> None:
    nodes(graph, "paged_attention")[-1].append(nodes(graph, "selected_kv_write")[-1])


def another_owners_landmarks(graph: ExportedGraph) -> None:
    first, last = nodes(graph, "landmark_select")[0], nodes(graph, "landmark_select")[-1]
    last.args = (last.args[0], first.args[1], *last.args[2:])


def another_owners_values(graph: ExportedGraph) -> None:
    first, last = nodes(graph, "selected_kv_write")[0], nodes(graph, "selected_kv_write")[-1]
    last.args = (*last.args[:2], first.args[2], *last.args[3:])


def another_owners_factors(graph: ExportedGraph) -> None:
    first, last = nodes(graph, "selected_kv_write")[0], nodes(graph, "selected_kv_write")[-1]
    last.args = (first.args[0], *last.args[1:])


def the_last_layers_choice(graph: ExportedGraph) -> None:
    select, update = nodes(graph, "landmark_select")[0], nodes(graph, "chunk_cache_update")[1]
    update.args = (select, *update.args[1:])


def the_last_layers_queries(graph: ExportedGraph) -> None:
    first, second = nodes(graph, "landmark_select")[:2]
    second.args = (first.args[0], *second.args[1:])


def chunks_for_places(graph: ExportedGraph) -> None:
    write = nodes(graph, "selected_kv_write")[0]
    write.args = (*write.args[:5], write.args[4], *write.args[6:])


def the_cache_for_the_prompt(graph: ExportedGraph) -> None:
    write = nodes(graph, "selected_kv_write")[0]
    write.args = (*write.args[:6], write.args[7], *write.args[7:])


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (drop_the_writes, "a layer that selects chunks calls each of"),
        (select_after_reading, "a layer that selects chunks calls each of"),
        (another_owners_landmarks, "does not take landmarks of the owner whose cache is read next"),
        (another_owners_values, "does not take host_v of the owner"),
        (another_owners_factors, "does not take u of the owner"),
        (the_last_layers_choice, "takes another selected than the layer's own"),
        (the_last_layers_queries, "takes another q than the layer's own"),
        (chunks_for_places, "takes other places than chunk_cache_update gives"),
        (the_cache_for_the_prompt, "takes another shadow_table than the layer's own"),
    ],
)
def test_a_damaged_graph_is_refused(
    damage: Callable[[ExportedGraph], None],
    sentence: str,
    upper: ExportedGraph,
    config: ModelConfig,
    options: ResolvedOptions,
) -> None:
    graph = copy.deepcopy(upper)
    damage(graph)
    with pytest.raises(BuildError) as error:
        verify(graph, config, options)
    assert sentence in str(error.value) and str(error.value).startswith("Graph upper: node ")


def test_a_selection_after_the_last_layer_is_refused(
    lower: ExportedGraph, config: ModelConfig, options: ResolvedOptions
) -> None:
    graph = copy.deepcopy(lower)
    last, select = nodes(graph, "paged_attention")[-1], nodes(graph, "landmark_select")[0]
    with graph.program.graph.inserting_after(last):
        graph.program.graph.call_function(select.target, select.args)
    with pytest.raises(BuildError, match="changes a cache that no layer reads afterwards"):
        verify(graph, config, options)


@pytest.mark.parametrize("name", ["lower", "upper"])
def test_graphs_of_another_policy_are_refused(
    name: str, lower: ExportedGraph, upper: ExportedGraph, config: ModelConfig, options: ResolvedOptions
) -> None:
    graph, plain = {"lower": lower, "upper": upper}[name], dataclasses.replace(options, policy=Full())
    with pytest.raises(BuildError, match="is a cache pool of dtype"):
        verify(graph, config, plain)
    other = dataclasses.replace(options, policy=parse(POLICY.replace("sparse_budget=8", "sparse_budget=6")))
    with pytest.raises(BuildError, match="selects 4 chunks of 2 tokens, not what the KV policy says"):
        verify(graph, config, other)
