"""The ONNX function bodies in onnxruntime: float16, bad numbers, and what nodes, functions and plugins agree on.

``test_every_backend.py`` has them among the other backends on the cases of float32 and bfloat16.
"""

import onnx
import pytest
import torch

import plugins
from plugins.onnx_body import DOMAIN, OPSET
from plugins.onnx_nodes import ONNX_NODES
from tests.support.onnx.nodes import run_node_chain
from tests.support.operators.backends import run_onnx
from tests.support.operators.cases import CASES, choices, difference, reference
from tests.support.random_cases import Seeds

NUM_CASES, NUM_SHORT = 320, 60
WITH_FLOAT16 = [n for n, op in plugins.OPERATORS.items() if "onnx" in op.backends and "dtypes" in choices(n)]


@pytest.mark.parametrize("name", WITH_FLOAT16)
def test_float16(name: str, seeds: Seeds) -> None:
    for seed in seeds(NUM_SHORT, NUM_CASES):
        args = CASES[name](seed, dtypes=(torch.float32, torch.float16))
        wrong = difference(name, args, run_onnx(name, args), reference(name, args))
        assert wrong is None, (seed, wrong)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_a_bad_number_shows_in_the_dynamic_scale(dtype: torch.dtype, bad: float) -> None:
    k, v = torch.randn(2, 3, 1, 16)
    k[1, 0, 3] = bad
    pools = [torch.zeros(1, 4, 1, 16).to(dtype) for _ in range(2)] + [torch.zeros(1, 4, 1) for _ in range(2)]
    slots = torch.tensor([0, 1, 2], dtype=torch.int32)
    tensors = (k, v, torch.ones(3, 8), torch.zeros(3, 8), slots, *pools)
    given = plugins.OPERATORS["rope_paged_kv_write"].bind(*tensors)
    got = run_node_chain(("RopePagedKvWriteDynamic",), given, {}, pools)
    assert got[2].isfinite().flatten().tolist() == [True, False, True, True]
    assert got[3].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_static_scales_saturate_and_keep_nan_where_there_is_one(dtype: torch.dtype) -> None:
    """As the reference: infinity saturates, NaN stays NaN in e4m3 and is 0 in int8."""
    k = torch.randn(4, 2, 16)
    k[0, 0, :4] = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e30])
    pools = [torch.zeros(1, 4, 2, 16).to(dtype) for _ in range(2)]
    slots = torch.arange(4, dtype=torch.int32)
    args = (k, k.flip(0), torch.ones(4, 8), torch.zeros(4, 8), slots, *pools, None, None, 0.02, 0.03)
    name = "rope_paged_kv_write"
    assert difference(name, args, run_onnx(name, args), reference(name, args)) is None


@pytest.mark.parametrize("name", ONNX_NODES)
def test_nodes_and_functions_agree(name: str) -> None:
    """Names that no standard operator has, one interface, and bodies of standard operators only."""
    operator = ONNX_NODES[name]
    assert name not in {schema.name for schema in onnx.defs.get_all_schemas()}
    attributes = {attribute: kind(2) for attribute, kind in operator.attributes}
    node = operator.node(list(operator.inputs), list(operator.outputs), **attributes)
    given = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    assert given == attributes | {"plugin_namespace": b"kvforge", "plugin_version": b"1"}
    for cache in operator.caches:
        function = operator.body(cache)
        assert (function.domain, function.name) == (node.domain, node.op_type) == (DOMAIN, name)
        assert tuple(function.input) == operator.inputs and tuple(function.output) == operator.outputs
        assert set(function.attribute) == set(attributes)
        assert [(entry.domain, entry.version) for entry in function.opset_import] == [("", OPSET)]
        assert {inner.domain for inner in function.node} == {""}
        assert operator.body(cache).SerializeToString() == function.SerializeToString()
    with pytest.raises(ValueError, match=f"{name} takes the attributes"):
        operator.node([], [], **attributes, other=1)


def test_the_tensorrt_plugins_have_the_interface_of_the_nodes() -> None:
    """TensorRT makes a plugin of a node by its name; inputs go by position, attributes by name."""
    from plugins.trt_plugins import PLUGINS

    assert PLUGINS.keys() & ONNX_NODES.keys()
    for name in PLUGINS.keys() & ONNX_NODES.keys():
        plugin, operator = PLUGINS[name], ONNX_NODES[name]
        assert plugin.inputs == operator.inputs and plugin.num_outputs == len(operator.outputs), name
        assert dict(plugin.attributes) == dict(operator.attributes), name
