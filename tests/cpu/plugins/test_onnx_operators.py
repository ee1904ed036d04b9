"""The ONNX function bodies, run by onnxruntime, against the operators' references."""

import itertools

import onnx
import pytest
import torch
from torch import Tensor

import plugins
from plugins.onnx_body import DOMAIN, OPSET
from plugins.onnx_operators import ONNX_OPERATORS
from plugins.random_cases import (
    low_rank_key_reconstruct_case,
    paged_attention_case,
    rope_paged_kv_write_case,
    speculative_verify_case,
)
from tests.support.onnx_operators import run_operator

NUM_CASES = 320
FLOAT16 = (torch.float32, torch.float16)
REFERENCES = {name: operator.reference for name, operator in plugins.OPERATORS.items()}


def bits(tensor: Tensor) -> Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want.float()).abs().max() / want.float().abs().max().clamp(min=1e-30))


def tolerance(dtype: torch.dtype) -> float:
    return {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]


def write(arguments: tuple) -> tuple[list[Tensor], list[Tensor]]:
    """The pools after a write: of the ONNX operator, and of the reference."""
    *tokens, k_pool, v_pool, k_scales, v_scales, k_scale, v_scale = arguments
    pools = [pool for pool in (k_pool, v_pool, k_scales, v_scales) if pool is not None]
    dynamic = len(pools) == 4
    want = [pool.clone() for pool in pools]
    REFERENCES["rope_paged_kv_write"](*tokens, *want, *([] if dynamic else [None, None]), k_scale, v_scale)
    name, attributes = ("RopePagedKvWriteDynamic", {}) if dynamic else ("RopePagedKvWrite", scales(k_scale, v_scale))
    return run_operator(name, (*tokens, *pools), attributes, tuple(pool.dtype for pool in pools)), want


def scales(k_scale: float, v_scale: float) -> dict[str, float]:
    return {"k_scale": k_scale, "v_scale": v_scale}


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), FLOAT16], ids=["bfloat16", "float16"])
def test_rope_paged_kv_write(dtypes: tuple[torch.dtype, ...]) -> None:
    """Every bit of the pools: what is written, its scales, and what is not."""
    for seed in range(NUM_CASES):
        got, want = write(rope_paged_kv_write_case(seed, dtypes=dtypes))
        for one, other in zip(got, want, strict=True):
            assert one.dtype == other.dtype and one.shape == other.shape
            assert torch.equal(bits(one), bits(other)), seed


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_a_bad_number_shows_in_the_dynamic_scale(dtype: torch.dtype) -> None:
    for bad in (float("nan"), float("inf")):
        k, v = torch.randn(2, 3, 1, 16)
        k[1, 0, 3] = bad
        pools = [torch.zeros(1, 4, 1, 16).to(dtype) for _ in range(2)] + [torch.zeros(1, 4, 1) for _ in range(2)]
        ones, slots = torch.ones(3, 8), torch.tensor([0, 1, 2], dtype=torch.int32)
        got, _ = write((k, v, ones, torch.zeros(3, 8), slots, *pools, 1.0, 1.0))
        assert got[2].isfinite().flatten().tolist() == [True, False, True, True]
        assert got[3].isfinite().all()


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), FLOAT16], ids=["bfloat16", "float16"])
def test_paged_attention(dtypes: tuple[torch.dtype, ...], full: bool) -> None:
    count = NUM_CASES if full or torch.bfloat16 in dtypes else 40
    for seed in range(count):
        *tensors, scale, window, k_scales, v_scales, k_scale, v_scale = paged_attention_case(seed, dtypes=dtypes)
        want = REFERENCES["paged_attention"](*tensors, scale, window, k_scales, v_scales, k_scale, v_scale)
        attributes = {"scale": scale, "window": window}
        if k_scales is None:
            attributes |= scales(k_scale, v_scale)
            (got,) = run_operator("PagedAttention", tuple(tensors), attributes, (want.dtype,))
        else:
            inputs = (*tensors, k_scales, v_scales)
            (got,) = run_operator("PagedAttentionDynamic", inputs, attributes, (want.dtype,))
        assert got.shape == want.shape and got.dtype == want.dtype
        if got.numel():
            assert got.isfinite().all() and relative_error(got, want) < tolerance(want.dtype), seed


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), FLOAT16], ids=["bfloat16", "float16"])
def test_low_rank_key_reconstruct(dtypes: tuple[torch.dtype, ...]) -> None:
    for seed in range(NUM_CASES):
        arguments = low_rank_key_reconstruct_case(seed, dtypes=dtypes)
        want = REFERENCES["low_rank_key_reconstruct"](*arguments)
        (got,) = run_operator("LowRankKeyReconstruct", arguments, {}, (want.dtype,))
        assert got.shape == want.shape and got.dtype == want.dtype
        if got.numel():
            assert relative_error(got, want) < tolerance(want.dtype), seed
            assert (got[arguments[3] < 0] == 0).all(), seed


def is_near_a_boundary(arguments: tuple[Tensor, ...], sequence: int, got: tuple[int, int]) -> bool:
    """Whether the reference gives ``got`` when both uniform numbers are moved by 1e-4 at most."""
    for accept, draw in itertools.product((-1e-4, 0.0, 1e-4), repeat=2):
        moved = (*arguments[:-1], arguments[-1] + torch.tensor([accept, draw]))
        if tuple(int(result[sequence]) for result in REFERENCES["speculative_verify"](*moved)) == got:
            return True
    return False


def test_speculative_verify() -> None:
    for seed in range(NUM_CASES):
        arguments = speculative_verify_case(seed)
        want = REFERENCES["speculative_verify"](*arguments)
        got = run_operator("SpeculativeVerify", arguments, {}, (torch.int32, torch.int32))
        assert [x.shape for x in got] == [x.shape for x in want]
        for sequence in range(len(want[0])):
            one = int(got[0][sequence]), int(got[1][sequence])
            same = one == (int(want[0][sequence]), int(want[1][sequence]))
            assert same or is_near_a_boundary(arguments, sequence, one), (seed, sequence)


@pytest.mark.parametrize("name", ONNX_OPERATORS)
def test_nodes_and_functions_agree(name: str) -> None:
    """Names that no standard operator has, one interface, and bodies of standard operators only."""
    operator = ONNX_OPERATORS[name]
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

    assert PLUGINS.keys() & ONNX_OPERATORS.keys()
    for name in PLUGINS.keys() & ONNX_OPERATORS.keys():
        plugin, operator = PLUGINS[name], ONNX_OPERATORS[name]
        assert plugin.inputs == operator.inputs and plugin.num_outputs == len(operator.outputs), name
        assert dict(plugin.attributes) == dict(operator.attributes), name
