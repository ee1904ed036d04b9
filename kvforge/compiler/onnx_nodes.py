"""How an exported graph's calls of our operators become ONNX nodes of the domain ``kvforge``."""

from collections.abc import Callable
from typing import Any

import onnx
import torch
from onnxscript.values import Op, Opset

from plugins.onnx_body import DOMAIN, DOMAIN_VERSION
from plugins.onnx_node import PLUGIN_ATTRIBUTES
from plugins.onnx_operators import ONNX_OPERATORS

_OpSchema = onnx.defs.OpSchema
_ATTRIBUTE_TYPES = {float: _OpSchema.AttrType.FLOAT, int: _OpSchema.AttrType.INT, str: _OpSchema.AttrType.STRING}
_TENSORS = [f"tensor({name})" for name in ("float", "float16", "bfloat16", "float8e4m3fn", "int8", "int32")]

Translations = dict[Callable[..., Any], Callable[..., Any]]


def _node_maker(name: str) -> Callable[..., Any]:
    """Return what makes a node of this name while torch exports, given its inputs and attributes."""
    operator = ONNX_OPERATORS[name]
    attributes = [*operator.attributes, *((attribute, str) for attribute in PLUGIN_ATTRIBUTES)]
    schema = _OpSchema(
        name,
        DOMAIN,
        DOMAIN_VERSION,
        inputs=[_OpSchema.FormalParameter(parameter, f"T_{parameter}") for parameter in operator.inputs],
        outputs=[_OpSchema.FormalParameter(parameter, f"T_{parameter}") for parameter in operator.outputs],
        type_constraints=[(f"T_{parameter}", _TENSORS, "") for parameter in (*operator.inputs, *operator.outputs)],
        attributes=[_OpSchema.Attribute(attribute, _ATTRIBUTE_TYPES[kind]) for attribute, kind in attributes],
    )
    op = Op(Opset(DOMAIN, DOMAIN_VERSION), name, schema)

    def make(*inputs: Any, **given: Any) -> Any:
        return op(*inputs, **{label: kind(given[label]) for label, kind in operator.attributes}, **PLUGIN_ATTRIBUTES)

    return make


def translations() -> Translations:
    """Return the table for ``torch.onnx.export``: operator overload to what makes its node."""
    write, write_dynamic = _node_maker("RopePagedKvWrite"), _node_maker("RopePagedKvWriteDynamic")
    attend, attend_dynamic = _node_maker("PagedAttention"), _node_maker("PagedAttentionDynamic")

    def rope_paged_kv_write(
        k: Any,
        v: Any,
        cos: Any,
        sin: Any,
        slot_mapping: Any,
        k_pool: Any,
        v_pool: Any,
        k_scale: float,
        v_scale: float,
    ) -> Any:
        return write(k, v, cos, sin, slot_mapping, k_pool, v_pool, k_scale=k_scale, v_scale=v_scale)

    def paged_attention(
        q: Any,
        k_pool: Any,
        v_pool: Any,
        query_start: Any,
        kv_length: Any,
        page_table: Any,
        scale: float,
        window: int,
        k_scales: Any = None,
        v_scales: Any = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> Any:
        tensors = (q, k_pool, v_pool, query_start, kv_length, page_table)
        if k_scales is not None:
            return attend_dynamic(*tensors, k_scales, v_scales, scale=scale, window=window)
        return attend(*tensors, scale=scale, window=window, k_scale=k_scale, v_scale=v_scale)

    operators = torch.ops.kvforge
    return {
        operators.rope_paged_kv_write_functional.default: rope_paged_kv_write,
        operators.rope_paged_kv_write_dynamic_functional.default: write_dynamic,
        operators.paged_attention.default: paged_attention,
        operators.low_rank_key_reconstruct.default: _node_maker("LowRankKeyReconstruct"),
        operators.speculative_verify.default: _node_maker("SpeculativeVerify"),
    }
