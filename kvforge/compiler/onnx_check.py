"""Checks on an ONNX graph: every node can be executed, and the cache is written and read as the model says."""

from typing import NoReturn

from onnx import ModelProto, NodeProto, helper

from kvforge.common.errors import BuildError
from kvforge.compiler.options import ResolvedOptions
from model_defs import ModelConfig
from model_defs.graphs import scales_by_owner
from plugins.onnx_body import DOMAIN
from plugins.onnx_node import PLUGIN_ATTRIBUTES
from plugins.onnx_nodes import ONNX_NODES

_POOLS = ("k_pool", "v_pool", "k_scales", "v_scales")


def check_graph(model: ModelProto, name: str, config: ModelConfig, options: ResolvedOptions) -> None:
    """Check that every node is standard or ours with a function body, and for ``lower`` and ``upper`` that layer i
    reads the pools of its owner, which ``lower`` writes once, before they are read, and returns. ``early_exit`` has no
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
    roles = _POOLS if options.has_scale_pools else _POOLS[:2]
    ending = "Dynamic" if options.has_scale_pools else ""
    is_lower = name == "lower"
    owners = config.owners if is_lower else config.upper_owners
    scales = scales_by_owner(config, options.kv_scales)
    current = {owner: [f"{role}_{owner}" for role in roles] for owner in owners}
    writes: list[int] = []
    reads: list[int] = []
    for node in model.graph.node:
        if node.domain != DOMAIN:
            continue
        operator = ONNX_NODES[node.op_type]
        pools = [node.input[operator.inputs.index(role)] for role in roles if role in operator.inputs]
        owner = next((owner for owner, names in current.items() if names == pools), None)
        if owner is None or not node.op_type.endswith(ending):
            _fail(name, node, f"takes {pools}, which are not the pools of one owner at this point")
        given = tuple(_attributes(node).get(label, 1.0) for label in ("k_scale", "v_scale"))
        if any(abs(one - other) > 1e-6 * other for one, other in zip(given, scales[owner], strict=True)):
            _fail(name, node, f"takes {given} as the scales of layer {owner}, which are {scales[owner]}")
        if "k_pool_out" in operator.outputs:
            writes.append(owner)
            current[owner] = list(node.output)
        else:
            reads.append(owner)
            if is_lower and owner not in writes:
                _fail(name, node, f"reads the cache of layer {owner} before this step's K and V are written")
    layers = range(config.cut) if is_lower else range(config.cut, config.num_layers)
    expected = [config.owner_of_layer[layer] for layer in layers], list(config.owners) if is_lower else []
    if (reads, sorted(writes)) != expected:
        raise BuildError(
            f"ONNX graph {name} reads the caches of layers {reads} and writes {sorted(writes)}; the model asks for "
            f"{expected[0]} and {expected[1]}."
        )
    results = [output.name for output in model.graph.output][1:]
    written = [pool for owner in owners for pool in current[owner]] if is_lower else []
    if results != written:
        raise BuildError(f"ONNX graph {name} returns the pools {results}; its last writes are {written}.")


def _attributes(node: NodeProto) -> dict:
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


def _fail(name: str, node: NodeProto, what: str) -> NoReturn:
    raise BuildError(f"ONNX graph {name}: node {node.name or node.op_type} {what}.")
