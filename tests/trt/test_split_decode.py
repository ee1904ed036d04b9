"""The rewrite of attention nodes into split-KV decode's two, on graphs with pools that are written before."""

import onnx
import pytest
from onnx import TensorProto, helper

from plugins.paged_attention.split_decode import split_decode
from plugins.trt_plugins import PLUGINS

STEP = ("query_start", "kv_length", "page_table")
ATTRIBUTES = {"scale": 0.125, "window": 7, "k_scale": 0.5, "v_scale": 0.25, "plugin_namespace": "kvforge"}


def model(kv_heads: int, pool_inputs=("k_pool_0", "v_pool_0")) -> onnx.ModelProto:
    shape = ("pages", 16, kv_heads, 64)
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, shape) for name in pool_inputs]
    write = helper.make_node(
        "RopePagedKvWrite",
        ["k", "v", "cos", "sin", "slot_mapping", *pool_inputs],
        ["k_new", "v_new"],
        domain="kvforge",
        k_scale=0.5,
        v_scale=0.25,
    )
    again = helper.make_node(
        "RopePagedKvWrite", [*write.input[:5], "k_new", "v_new"], ["k_newer", "v_newer"], domain="kvforge"
    )
    attend = helper.make_node(
        "PagedAttention", ["q", "k_newer", "v_newer", *STEP], ["y"], name="attend", domain="kvforge", **ATTRIBUTES
    )
    last = helper.make_node("Identity", ["y"], ["z"])
    functions = [
        helper.make_function("kvforge", name, [], [], [], [helper.make_opsetid("", 20)])
        for name in ("PagedAttention", "RopePagedKvWrite")
    ]
    graph = helper.make_graph([write, again, attend, last], "g", inputs, [])
    return helper.make_model(graph, functions=functions)


def test_two_nodes_for_one():
    rewritten = model(kv_heads=4)
    assert split_decode(rewritten, lambda kv_heads: 100 + kv_heads) == 1
    kinds = [node.op_type for node in rewritten.graph.node]
    assert kinds == ["RopePagedKvWrite"] * 2 + ["PagedAttentionPartial", "PagedAttentionCombine", "Identity"]
    partial, combine = rewritten.graph.node[2:4]
    assert list(combine.input) == [*partial.input, partial.output[0]] and list(combine.output) == ["y"]
    for node in (partial, combine):
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        assert attributes.pop("num_splits") == 104
        assert attributes.pop("plugin_namespace") == b"kvforge"
        assert attributes == pytest.approx({"scale": 0.125, "window": 7, "k_scale": 0.5, "v_scale": 0.25})
        plugin = PLUGINS[node.op_type]
        assert len(node.input) == len(plugin.inputs)
        assert {name for name, _ in plugin.attributes} == {*attributes, "num_splits"}
    assert [function.name for function in rewritten.functions] == ["RopePagedKvWrite"]


def test_nothing_to_do():
    untouched = model(kv_heads=4)
    del untouched.graph.node[2:]
    before = untouched.graph.SerializeToString()
    assert split_decode(untouched, lambda kv_heads: 16) == 0
    assert untouched.graph.SerializeToString() == before


def test_a_pool_from_elsewhere_is_refused():
    unknown = model(kv_heads=4)
    del unknown.graph.input[:]
    with pytest.raises(ValueError, match="attend: k_newer is no pool"):
        split_decode(unknown, lambda kv_heads: 16)
