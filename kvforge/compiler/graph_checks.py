"""Checks on an exported graph, run after export and before code generation."""

from collections import Counter
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch.fx import Node

import plugins
from kvforge.common.errors import BuildError
from kvforge.common.graph_nodes import argument, source_of
from kvforge.compiler.export import ExportedGraph, pool_specs
from kvforge.compiler.options import ResolvedOptions
from kvforge.compiler.seal_checks import broken_rule
from kvforge.compiler.state_checks import broken_state_rule
from kvforge.kv_policies.registry import operators
from model_defs import ModelConfig
from model_defs.draft_head import DraftHead
from model_defs.graphs import scales_by_owner
from model_defs.kv_layout import NO_OWNER

_LINEAR = "kvforge::packed_linear"
_ALLOWED = {
    graph: {operator.qualified_name for operator in plugins.OPERATORS.values() if graph in operator.graphs}
    for graph in ("lower", "upper", "early_exit", "verify")
}
_ALLOWED["predict"] = _ALLOWED["draft"] = _ALLOWED["lower"]
_CACHE_WRITERS = {operator.qualified_name for operator in plugins.OPERATORS.values() if "k_pool" in operator.writes}
_OF_CACHE = {
    operator.qualified_name
    for operator in plugins.OPERATORS.values()
    if any(argument.name == "k_pool" for argument in operator.arguments)
}
_POOL_ARGUMENTS = ("k_pool", "v_pool", "k_scales", "v_scales")


@dataclass(frozen=True)
class _PoolInput:
    """A placeholder of the graph: the owner it belongs to and which argument of operators it is."""

    owner: int
    role: str


def verify(graph: ExportedGraph, config: ModelConfig, options: ResolvedOptions) -> None:
    """Check that ``graph`` does to the cache exactly what the model says.

    Every operator is known and belongs to the graph; every owner's pools are written once by ``lower`` and never by
    ``upper``, but those above a blind cut by ``upper`` alone; where pages are sealed, this is done once behind the
    write; layer i reads its owner's pools, after the write; elements and scales go together, with the owner's static
    scale where it has one; what a KV policy puts into layers is there with that policy, and only then, right
    before a layer reads its owner's pools, and as the policy's own check says; layers that keep a state take
    their own states; ``early_exit`` has nothing to do with the cache; linear layers are packed where the options say
    so and nowhere else; pools, hidden state, logits and tokens have the declared dtypes; ``draft`` writes its own
    pools and then reads them.

    Raises:
        BuildError: naming the node that breaks a rule.
    """
    calls = [(node, name) for node in graph.program.graph.nodes if (name := _operator_name(graph, node))]
    if graph.name == "verify":
        (only,) = _ALLOWED["verify"]
        if [name for _, name in calls] != [only]:
            raise BuildError(f"Graph verify calls {[name for _, name in calls]}; it must be one {only}.")
        _check_results(graph, [torch.int32, torch.int32])
        return
    _check_linears(graph, options)
    if graph.name == "draft" and options.draft_head is not None:
        _check_draft(graph, options.draft_head, [call for call in calls if not _is_apart(graph, call[1])])
        _check_results(graph, [torch.int32, options.torch_dtype])
        return
    if graph.name == "predict":
        _check_prediction(graph, config, options, [call for call in calls if not _is_apart(graph, call[1])])
    elif graph.name != "early_exit":
        check = _check_sealing if options.policy.sealing else _check_cache
        check(graph, config, options, [call for call in calls if not _is_apart(graph, call[1])])
        _check_states(graph, calls)
    results = [options.torch_dtype if graph.name in ("lower", "predict") else torch.float32]
    reads_above = options.draft_head is not None and not options.draft_head.reads_below(config)
    _check_results(graph, results + ([options.torch_dtype] if graph.name == "upper" and reads_above else []))


def _is_apart(graph: ExportedGraph, name: str) -> bool:
    """Whether an operator of the graph has nothing to do with the cache."""
    return name in _ALLOWED[graph.name] and name not in _OF_CACHE


def _allowed(graph: ExportedGraph) -> set[str]:
    """The operators of a graph, besides those of a KV policy."""
    return _ALLOWED[graph.name] | (_CACHE_WRITERS & _ALLOWED["lower"] if graph.num_past_cut else set())


def _check_linears(graph: ExportedGraph, options: ResolvedOptions) -> None:
    foreign = _LINEAR if options.packed_dtype is None else "aten::linear"
    for node in graph.program.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name == foreign:
            _fail(graph, node, f"calls {node.target}, but weights are packed as {options.packed_dtype}")


def _check_cache(
    graph: ExportedGraph, config: ModelConfig, options: ResolvedOptions, calls: list[tuple[Node, str]]
) -> None:
    pools = _pool_inputs(graph, config, options)
    scales = scales_by_owner(config, options.kv_scales)
    writes: Counter[int] = Counter()
    reads: list[int] = []
    inserted: list[Node] = []
    check = options.policy.insertion.layer_check()
    for node, name in calls:
        if name not in _allowed(graph):
            if name not in options.policy.insertion.operators:
                _fail(graph, node, f"calls {name}, which is not of the engine's KV policy {options.policy.name}")
            inserted.append(node)
            continue
        owner = _owner(graph, node, pools, options)
        found = tuple(argument(node, scale) for scale in ("k_scale", "v_scale") if _takes(node, scale))
        if found != scales[owner][: len(found)]:
            _fail(graph, node, f"takes {found} as the scales of layer {owner}, which are {scales[owner]}")
        if name in _CACHE_WRITERS:
            if owner in reads:
                _fail(graph, node, f"writes the cache of layer {owner} after it was read")
            writes[owner] += 1
            if writes[owner] > 1:
                _fail(graph, node, f"writes the cache of layer {owner} a second time")
        else:
            if check is not None:
                own = {pool.role: name for name, pool in pools.items() if pool.owner == owner}
                if broken := check(inserted, node, own):
                    _fail(graph, *broken)
            inserted = []
            reads.append(owner)
            if owner in graph.written and not writes[owner]:
                _fail(graph, node, f"reads the cache of layer {owner} before this step's K and V are written")
    if inserted:
        _fail(graph, inserted[0], "changes a cache that no layer reads afterwards")
    layers = range(config.cut) if graph.name == "lower" else range(config.cut, config.num_layers)
    expected_reads = [owner for layer in layers if (owner := config.owner_of_layer[layer]) != NO_OWNER]
    if reads != expected_reads or tuple(sorted(writes)) != graph.written:
        raise BuildError(
            f"Graph {graph.name} reads the caches of layers {reads} and writes {sorted(writes)}; "
            f"the model asks for {expected_reads} and {list(graph.written)}."
        )


def _check_prediction(
    graph: ExportedGraph, config: ModelConfig, options: ResolvedOptions, calls: list[tuple[Node, str]]
) -> None:
    """Check that every owner's pools are written once and never read, and those of each auxiliary layer that is run
    written once and then read once."""
    assert options.prediction is not None
    layers = range(options.prediction.num_layers - 1)
    names = [str(name) for name in graph.program.graph_signature.user_inputs]
    first = len(names) - 2 * len(layers)
    own = {name: index // 2 for index, name in enumerate(names[first:])}
    pools = _pool_inputs(graph, config, options, names[:first])
    written: list[int] = []
    of_layers: list[tuple[int, bool]] = []
    for node, name in calls:
        pool, writes = argument(node, "k_pool"), name in _CACHE_WRITERS
        if isinstance(pool, Node) and pool.name in own:
            of_layers.append((own[pool.name], writes))
        elif writes:
            written.append(_owner(graph, node, pools, options))
        else:
            _fail(graph, node, "reads the cache that it predicts")
    wanted = [(layer, writes) for layer in layers for writes in (True, False)]
    if sorted(written) != list(config.owners) or of_layers != wanted:
        raise BuildError(
            f"Graph predict writes the caches of {sorted(written)} and goes through its own as {of_layers}; the model "
            f"asks for {list(config.owners)} and {wanted}."
        )


def _check_draft(graph: ExportedGraph, head: DraftHead, calls: list[tuple[Node, str]]) -> None:
    """Check that the head's own pools, the graph's last inputs, are written and then read, and no others; where rows
    are K and V at once, they are one pool."""
    roles, model = _POOL_ARGUMENTS[:2], head.model
    own = [str(name) for name in graph.program.graph_signature.user_inputs][-model.kv_vectors :]
    wanted = [(True, own), (False, own * (len(roles) // len(own)))]
    found = [
        (
            name in _CACHE_WRITERS,
            [getattr(argument(node, role), "name", "") for role in roles if _takes(node, role)],
        )
        for node, name in calls
    ]
    if found != wanted:
        raise BuildError(f"Graph draft goes through its cache as {found}; it must write {own} and then read them.")


def _check_sealing(
    graph: ExportedGraph, config: ModelConfig, options: ResolvedOptions, calls: list[tuple[Node, str]]
) -> None:
    is_lower = graph.name == "lower"
    layers = range(config.cut) if is_lower else range(config.cut, config.num_layers)
    reads = [config.owner_of_layer[layer] for layer in layers]
    pools = _pool_inputs(graph, config, options)
    if broken := broken_rule(calls, pools, config.owners if is_lower else (), reads):
        node, rule = broken
        if node is None:
            raise BuildError(f"Graph {graph.name} {rule}.")
        _fail(graph, node, rule)


def _check_states(graph: ExportedGraph, calls: list[tuple[Node, str]]) -> None:
    inputs = [str(name) for name in graph.program.graph_signature.user_inputs]
    if broken := broken_state_rule(calls, inputs, graph.state_operators, graph.num_rows):
        node, rule = broken
        if node is None:
            raise BuildError(f"Graph {graph.name} {rule}.")
        _fail(graph, node, rule)


def _pool_inputs(
    graph: ExportedGraph, config: ModelConfig, options: ResolvedOptions, inputs: list[str] | None = None
) -> dict[str, _PoolInput]:
    """Map each pool placeholder's name to what it is; the pools are the last of the graph's ``inputs`` (default: all)
    but those of the KV policy."""
    specs = pool_specs(config, options, config.owners[0])
    state = options.policy.keeping.named_pools
    own = _POOL_ARGUMENTS if config.latent is None else _POOL_ARGUMENTS[::2]
    roles = (*own[: len(specs) - len(state)], *(pool.name for pool in state))
    expected = [
        (_PoolInput(owner, role), dtype)
        for owner in graph.pool_owners
        for role, (_, dtype) in zip(roles, specs, strict=True)
    ]
    names = list(graph.program.graph_signature.user_inputs) if inputs is None else inputs
    end = len(names) - len(options.policy.keeping.state_inputs) - graph.num_behind
    placeholders = {node.name: node for node in graph.program.graph.nodes if node.op == "placeholder"}
    pools: dict[str, _PoolInput] = {}
    for name, (pool, dtype) in zip(names[end - len(expected) : end], expected, strict=True):
        node = placeholders[str(name)]
        if node.meta["val"].dtype != dtype:
            _fail(graph, node, f"is a cache pool of dtype {node.meta['val'].dtype}, not {dtype}")
        pools[node.name] = pool
    return pools


def _operator_name(graph: ExportedGraph, node: Node) -> str | None:
    """Return the name of the kvforge operator that ``node`` calls, None if it calls one of torch's or nothing."""
    if node.op != "call_function":
        return None
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        if target.namespace in ("aten", "prims"):
            return None
        name: str = target._schema.name
        is_policys = name in operators()
        if name in _allowed(graph) or (is_policys and graph.name in ("lower", "upper")):
            return name
        if is_policys or any(name in names for names in _ALLOWED.values()):
            _fail(graph, node, f"calls {target}, which does not belong into this graph")
    elif getattr(target, "__module__", "") in ("_operator", "torch"):  # arithmetic on symbolic sizes
        return None
    _fail(graph, node, f"calls {target}, which no target implements")


def _owner(graph: ExportedGraph, node: Node, pools: dict[str, _PoolInput], options: ResolvedOptions) -> int:
    """Return the owner whose pools ``node`` takes, all of them and each in its place."""
    values = {role: argument(node, role) for role in _POOL_ARGUMENTS if _takes(node, role)}
    is_view = options.policy.insertion.views_pools and _operator_name(graph, node) not in _CACHE_WRITERS
    nodes = {role: value for role, value in values.items() if isinstance(value, Node)}
    found = {role: pools.get((source_of(node) if is_view else node.name) or "") for role, node in nodes.items()}
    owner = next((pool.owner for pool in found.values() if pool is not None), -1)
    roles = [role for role in _POOL_ARGUMENTS if _takes(node, role) and (options.has_scale_pools or "pool" in role)]
    has_values = any(pool.role == "v_pool" for pool in pools.values())
    if found != {role: _PoolInput(owner, role if has_values else role.replace("v_", "k_")) for role in roles}:
        what = "the K and the V pool" + (" with their scales" if options.has_scale_pools else "")
        _fail(graph, node, f"does not take {what} of one owner")
    rotates = options.rotates_keys and has_values
    if _takes(node, "rotates_keys") and argument(node, "rotates_keys") != rotates:
        _fail(graph, node, f"{'does not rotate' if rotates else 'rotates'} the keys of layer {owner}")
    return owner


def _takes(node: Node, name: str) -> bool:
    """Whether an operator has an argument of this name: one that writes rows has none of V."""
    return any(one.name == name for one in node.target._schema.arguments)  # type: ignore[union-attr]


def _check_results(graph: ExportedGraph, dtypes: list[torch.dtype]) -> None:
    output = next(node for node in graph.program.graph.nodes if node.op == "output")
    results = [node.meta["val"].dtype for node in output.args[0] if isinstance(node, Node)]
    if results != dtypes:
        _fail(graph, output, f"returns tensors of dtypes {results}, not {dtypes}")


def _fail(graph: ExportedGraph, node: Node, what: str) -> NoReturn:
    raise BuildError(f"Graph {graph.name}: node {node.name} {what}.")
