"""The verifier on caches whose pages are sealed: what the compiler exports passes, and a broken rule is named."""

import copy
from collections.abc import Callable

import pytest
from torch.fx import Node

from kvforge.common.errors import BuildError
from kvforge.compiler.export import ExportedGraph, export_lower, export_upper
from kvforge.compiler.graph_checks import verify
from kvforge.compiler.options import BuildOptions, ResolvedOptions, resolve
from model_defs import ModelConfig, load_config
from tests.cpu.compiler.test_verify import HF, operator_nodes


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return load_config(HF | {"head_dim": 32})


@pytest.fixture(scope="module")
def options(config: ModelConfig) -> ResolvedOptions:
    return resolve(BuildOptions(page_size=32, kv_dtype="kivi2"), config, "F32")


@pytest.fixture(scope="module")
def lower(config: ModelConfig, options: ResolvedOptions) -> ExportedGraph:
    """Tests that change it do so in a copy."""
    return export_lower(config, options)


def seals(graph: ExportedGraph) -> list[Node]:
    return operator_nodes(graph, "seal_pages")


def reads(graph: ExportedGraph) -> list[Node]:
    return operator_nodes(graph, "grouped_attention")


def test_each_owner_is_written_once_sealed_once_and_then_read(
    lower: ExportedGraph, config: ModelConfig, options: ResolvedOptions
) -> None:
    upper = export_upper(config, options)
    verify(lower, config, options)
    verify(upper, config, options)
    names = [node.target._schema.name.split("::")[1] for node in lower.program.graph.nodes
             if node.op == "call_function" and str(node.target).startswith("kvforge.")]  # fmt: skip
    write, seal, read = "rope_paged_kv_write", "seal_pages", "grouped_attention"
    assert [name for name in names if name != "packed_linear"] == [write, seal, read] * 2 + [write, seal] * 2
    assert not seals(upper) and len(reads(upper)) == 3


def drop_a_seal(graph: ExportedGraph) -> None:
    graph.program.graph.erase_node(seals(graph)[-1])


def seal_twice(graph: ExportedGraph) -> None:
    node = seals(graph)[0]
    with graph.program.graph.inserting_after(node):
        graph.program.graph.call_function(node.target, node.args)


def seal_after_a_read(graph: ExportedGraph) -> None:
    reads(graph)[0].append(seals(graph)[0])


def seal_another_owner(graph: ExportedGraph) -> None:
    first, second = seals(graph)[:2]
    second.args = first.args


def read_pools_of_two_owners(graph: ExportedGraph) -> None:
    first, second = reads(graph)[:2]
    second.args = (*second.args[:1], *first.args[1:2], *second.args[2:])


@pytest.mark.parametrize(
    ("break_it", "rule"),
    [
        (drop_a_seal, r"Graph lower reads the caches of layers \[0, 1\] and seals \[0, 1, 2\]; the model asks for"),
        (seal_twice, "does not write the cache of layer 0 once, then seal it once"),
        (seal_after_a_read, "reads the cache of layer 0 before this step's pages are written and sealed"),
        (seal_another_owner, "does not write the cache of layer 0 once, then seal it once"),
        (read_pools_of_two_owners, "does not take all pools of one owner, each in its place"),
    ],
)
def test_a_broken_rule_is_named(
    break_it: Callable[[ExportedGraph], None],
    rule: str,
    lower: ExportedGraph,
    config: ModelConfig,
    options: ResolvedOptions,
) -> None:
    graph = copy.deepcopy(lower)
    break_it(graph)
    with pytest.raises(BuildError, match=rule):
        verify(graph, config, options)
