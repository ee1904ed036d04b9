"""Checks on an exported graph, run after export and before code generation."""

from collections import Counter

import torch
from torch.fx import Node

from kvforge.compiler.export import ExportedGraph
from kvforge.compiler.options import DTYPES, ResolvedOptions
from kvforge.errors import BuildError
from model_defs import ModelConfig

_WRITE = "kvforge::rope_paged_kv_write"
_ATTEND = "kvforge::paged_attention"
_POOL_ARGUMENTS = {_WRITE: (5, 6), _ATTEND: (1, 2)}


def verify(graph: ExportedGraph, config: ModelConfig, options: ResolvedOptions) -> None:
    """Check that ``graph`` does to the cache exactly what the model says.

    Every operator is known; every owner's pools are written once by ``lower`` and never by ``upper``; layer i
    reads its owner's pools, after the write; pools, hidden state and logits have the declared dtypes.

    Raises:
        BuildError: naming the node that breaks a rule.
    """
    pools = _pool_inputs(graph, DTYPES[options.kv_dtype])
    writes: Counter[int] = Counter()
    reads: list[int] = []
    for node in graph.program.graph.nodes:
        if node.op != "call_function":
            continue
        name = _operator_name(graph, node)
        if name not in _POOL_ARGUMENTS:
            continue
        owner = _owner(graph, node, pools, _POOL_ARGUMENTS[name])
        if name == _WRITE:
            if owner in reads:
                _fail(graph, node, f"writes the cache of layer {owner} after it was read")
            writes[owner] += 1
            if writes[owner] > 1:
                _fail(graph, node, f"writes the cache of layer {owner} a second time")
        else:
            reads.append(owner)
            if graph.name == "lower" and not writes[owner]:
                _fail(graph, node, f"reads the cache of layer {owner} before this step's K and V are written")
    is_lower = graph.name == "lower"
    layers = range(config.cut) if is_lower else range(config.cut, config.num_layers)
    expected_reads = [config.owner_of_layer[layer] for layer in layers]
    expected_writes = config.owners if is_lower else ()
    if reads != expected_reads or tuple(sorted(writes)) != expected_writes:
        raise BuildError(
            f"Graph {graph.name} reads the caches of layers {reads} and writes {sorted(writes)}; "
            f"the model asks for {expected_reads} and {list(expected_writes)}."
        )
    _check_result(graph, DTYPES[options.dtype] if is_lower else torch.float32)


def _pool_inputs(graph: ExportedGraph, kv_dtype: torch.dtype) -> dict[str, tuple[int, int]]:
    """Map each pool placeholder's name to (owner, 0 for K or 1 for V)."""
    names = list(graph.program.graph_signature.user_inputs)
    placeholders = {node.name: node for node in graph.program.graph.nodes if node.op == "placeholder"}
    pool_names = names[len(names) - 2 * len(graph.pool_owners) :]
    pools: dict[str, tuple[int, int]] = {}
    for index, name in enumerate(pool_names):
        node = placeholders[str(name)]
        if node.meta["val"].dtype != kv_dtype:
            _fail(graph, node, f"is a cache pool of dtype {node.meta['val'].dtype}, not {kv_dtype}")
        pools[node.name] = (graph.pool_owners[index // 2], index % 2)
    return pools


def _operator_name(graph: ExportedGraph, node: Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        if target.namespace in ("aten", "prims"):
            return target._schema.name
        if target._schema.name in _POOL_ARGUMENTS:
            return target._schema.name
        _fail(graph, node, f"calls {target}, which no target implements")
    if getattr(target, "__module__", "") in ("_operator", "torch"):  # arithmetic on symbolic sizes
        return str(target)
    _fail(graph, node, f"calls {target}, which no target implements")
    raise AssertionError


def _owner(graph: ExportedGraph, node: Node, pools: dict[str, tuple[int, int]], arguments: tuple[int, int]) -> int:
    k, v = (node.args[index] for index in arguments)
    found = [pools.get(argument.name) if isinstance(argument, Node) else None for argument in (k, v)]
    if found[0] is None or found[1] is None or found[0][0] != found[1][0] or (found[0][1], found[1][1]) != (0, 1):
        _fail(graph, node, "does not take the K and the V pool of one owner")
    return found[0][0]  # type: ignore[index]


def _check_result(graph: ExportedGraph, dtype: torch.dtype) -> None:
    output = next(node for node in graph.program.graph.nodes if node.op == "output")
    results = [node for node in output.args[0] if isinstance(node, Node)]
    if len(results) != 1 or results[0].meta["val"].dtype != dtype:
        _fail(graph, output, f"must return one tensor of dtype {dtype}")


def _fail(graph: ExportedGraph, node: Node, what: str) -> None:
    raise BuildError(f"Graph {graph.name}: node {node.name} {what}.")
