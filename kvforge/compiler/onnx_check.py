"""Checks on an ONNX graph: every node can be executed, and the cache is written and read as the model says."""

from typing import NoReturn

from onnx import ModelProto, NodeProto, helper

from kvforge.common.errors import BuildError
from kvforge.compiler.options import ResolvedOptions
from kvforge.tensorrt.graph_tensors import CACHE_ROLES, operators_of, pool_roles
from model_defs import ModelConfig
from model_defs.graphs import scales_by_owner
from plugins.onnx_body import DOMAIN
from plugins.onnx_node import PLUGIN_ATTRIBUTES
from plugins.onnx_nodes import NODES_OF, ONNX_NODES


def check_graph(model: ModelProto, name: str, config: ModelConfig, options: ResolvedOptions) -> None:
    """Check that every node is standard or ours with a function body, and for ``lower`` and ``upper`` that layer i
    reads the pools of its owner, which ``lower`` writes once, before they are read, and returns; and that what a KV
    policy calls before an attention works on the same owner. ``early_exit`` has no
    nodes of ours.

    Raises:
        BuildError: naming the node that breaks a rule.
    """
    bodies = {(function.domain, function.name) for function in model.functions}
    for node in model.graph.node:
        if node.domain not in ("", DOMAIN):
            _fail(name, node, f"is of the domain {node.domain}, which nothing here implements")
        if node.domain == DOMAIN:
            if name == "early_exit":
                _fail(name, node, "does not belong into this graph")
            _check_node(name, node, bodies)
    if name in ("lower", "upper"):
        _check_cache(model, name, config, options)


def _check_node(name: str, node: NodeProto, bodies: set[tuple[str, str]]) -> None:
    if (node.domain, node.op_type) not in bodies:
        _fail(name, node, "has no function body, without which only TensorRT can run it")
    operator = ONNX_NODES[node.op_type]
    if len(node.input) != len(operator.inputs) or not all(node.input):
        _fail(name, node, f"does not have the inputs {operator.inputs}")
    if set(_attributes(node)) != {label for label, _ in operator.attributes} | set(PLUGIN_ATTRIBUTES):
        _fail(name, node, f"has the attributes {sorted(_attributes(node))}")


def _check_cache(model: ModelProto, name: str, config: ModelConfig, options: ResolvedOptions) -> None:
    is_lower, roles = name == "lower", pool_roles(options.kv_dtype, options.policy)
    owners = config.owners if is_lower else config.owners_above
    scales = scales_by_owner(config, options.kv_scales)
    current = {owner: {role: f"{role}_{owner}" for role in roles} for owner in owners}
    of_policy = _nodes_of_policy(options)
    inserted: list[tuple[str, int | None]] = []  # operators of the KV policy since the last attention, and their owners
    writes: list[int] = []
    reads: list[int] = []
    for node in model.graph.node:
        if node.domain != DOMAIN:
            continue
        operator = ONNX_NODES[node.op_type]
        pools = {role: node.input[operator.inputs.index(role)] for role in roles if role in operator.inputs}
        owner = next((owner for owner, names in current.items() if pools.items() <= names.items()), None)
        lacks_scales = options.has_scale_pools and "k_pool" in pools and "k_scales" not in pools
        if owner is None or lacks_scales or not (pools or node.op_type in of_policy):
            _fail(name, node, f"takes {[*pools.values()]}, which are not the pools of one owner at this point")
        if "k_pool" in pools:
            _check_scales(name, node, owner, scales[owner])
        for output, value in zip(operator.outputs, node.output, strict=True):
            if (role := output.removesuffix("_out")) in pools:
                current[owner][role] = value
        if node.op_type in of_policy:
            inserted.append((of_policy[node.op_type], owner if pools else None))
        elif "k_pool_out" in operator.outputs:
            writes.append(owner)
        else:
            reads.append(owner)
            if is_lower and owner not in writes:
                _fail(name, node, f"reads the cache of layer {owner} before this step's K and V are written")
            _check_inserted(name, node, inserted, owner, options)
            inserted.clear()
    layers = range(config.cut) if is_lower else range(config.cut, config.num_layers)
    expected = [config.owner_of_layer[layer] for layer in layers], list(config.owners) if is_lower else []
    if (reads, sorted(writes)) != expected or inserted:
        raise BuildError(
            f"ONNX graph {name} reads the caches of layers {reads} and writes {sorted(writes)}; the model asks for "
            f"{expected[0]} and {expected[1]}."
        )
    results = [output.name for output in model.graph.output][1:]
    written = [
        value
        for owner in owners
        for role, value in current[owner].items()
        if value != f"{role}_{owner}" or (is_lower and role in CACHE_ROLES)
    ]
    if results != written:
        raise BuildError(f"ONNX graph {name} returns the pools {results}; its last writes are {written}.")


def _nodes_of_policy(options: ResolvedOptions) -> dict[str, str]:
    """Return the KV policy's operators by the names of their nodes."""
    return {node.name: name for name in operators_of(options.policy) for node in NODES_OF[name]}


def _check_inserted(
    name: str, attention: NodeProto, inserted: list[tuple[str, int | None]], owner: int, options: ResolvedOptions
) -> None:
    """Before each attention the KV policy's operators are called, on the cache that it reads."""
    found = list(dict.fromkeys(operator for operator, _ in inserted))
    if found != operators_of(options.policy):
        _fail(name, attention, f"follows {found}; the KV policy asks for {operators_of(options.policy)}")
    for operator, of in inserted:
        if of not in (None, owner):
            _fail(name, attention, f"reads the cache of layer {owner}, and {operator} before it that of layer {of}")


def _check_scales(name: str, node: NodeProto, owner: int, scales: tuple[float, float]) -> None:
    labels = dict(zip(("k_scale", "v_scale"), scales, strict=True))
    given = {label: value for label, value in _attributes(node).items() if label in labels}
    if any(abs(value - labels[label]) > 1e-6 * labels[label] for label, value in given.items()):
        _fail(name, node, f"takes {given} as the scales of layer {owner}, which are {labels}")


def _attributes(node: NodeProto) -> dict:
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


def _fail(name: str, node: NodeProto, what: str) -> NoReturn:
    raise BuildError(f"ONNX graph {name}: node {node.name or node.op_type} {what}.")
