"""TensorRT plugins of PagedAttention, each with a Dynamic form for caches with a scale per token and head.

A plugin is one kernel: PagedAttention does everything in one, PagedAttentionPartial and PagedAttentionCombine are the
two kernels of split-KV decode, chained through a tensor [S, heads, num_splits, head_dim + 2] float32.
"""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from plugins.paged_attention import OPERATOR
from plugins.triton_kernel import KernelSpec
from plugins.trt_cache import EIGHT_BIT, FLOATS, SCALES, cache_layout
from plugins.trt_plugin import Attributes, Outputs, PluginDefinition, SymbolicTensor, Tensors

if TYPE_CHECKING:
    from onnx import ModelProto

    from plugins.paged_attention.cuda import AttentionShape
    from plugins.paged_attention.cuda_tuning import Tuning

_NUM_SPLITS = (("num_splits", int),)


def num_splits(kv_heads: int) -> int:
    """How many parts the keys of a decoding sequence are split into, at most."""
    from plugins.paged_attention.cuda_tuning import default_tuning

    return default_tuning(128, 1, kv_heads, torch.bfloat16, torch.bfloat16, 90).num_splits


def rewrite(model: "ModelProto") -> None:
    """Split-KV decode's two plugins in place of each PagedAttention node of a network."""
    from plugins.paged_attention.split_decode import split_decode

    split_decode(model, num_splits)


def _tuned(tensors: Tensors, attributes: Attributes, capability: int) -> "tuple[AttentionShape, Tuning]":
    from plugins.paged_attention.cuda import AttentionShape

    q = tensors["q"]
    shape = AttentionShape(
        cache_layout(tensors, attributes), q.dtype, q.size(1), attributes["scale"], attributes["window"]
    )
    tuning = dataclasses.replace(shape.tuning(capability), num_splits=attributes.get("num_splits", 0))
    return shape, tuning


def _combine_spec(tensors: Tensors, attributes: Attributes, capability: int) -> KernelSpec:
    from plugins.paged_attention.cuda import combine_spec

    return combine_spec(*_tuned(tensors, attributes, capability))


def _partial_spec(tensors: Tensors, attributes: Attributes, capability: int) -> KernelSpec:
    from plugins.paged_attention.cuda import partial_spec

    return partial_spec(*_tuned(tensors, attributes, capability))


def _like_q(inputs: Mapping[str, SymbolicTensor], attributes: Attributes) -> Outputs:
    return (inputs["q"],)


def _partial(inputs: Mapping[str, SymbolicTensor], attributes: Attributes) -> Outputs:
    q = inputs["q"].shape
    shape = (inputs["kv_length"].shape[0], q[1], attributes["num_splits"], q[2] + 2)
    return (SymbolicTensor(torch.float32, shape),)


def _types(dynamic: bool, partial_in: bool = False, partial_out: bool = False) -> tuple[tuple[torch.dtype, ...], ...]:
    integers = (torch.int32,) * 3
    scales = (torch.float32,) * 2 if dynamic else ()
    partial = (torch.float32,) if partial_in else ()
    return tuple(
        (q, cache, cache, *integers, *scales, *partial, torch.float32 if partial_out else q)
        for q in FLOATS
        for cache in (EIGHT_BIT if dynamic else (*FLOATS, *EIGHT_BIT))
    )


def _plugins(dynamic: bool) -> tuple[PluginDefinition, ...]:
    suffix = "Dynamic" if dynamic else ""
    inputs = (*OPERATOR.tensors, *SCALES) if dynamic else OPERATOR.tensors
    attributes = OPERATOR.typed("scale", "window", *(() if dynamic else ("k_scale", "v_scale")))
    return (
        PluginDefinition(
            name=f"PagedAttention{suffix}",
            inputs=inputs,
            outputs=_like_q,
            num_outputs=1,
            types=_types(dynamic),
            spec=_combine_spec,
            attributes=attributes,
        ),
        PluginDefinition(
            name=f"PagedAttentionPartial{suffix}",
            inputs=inputs,
            outputs=_partial,
            num_outputs=1,
            types=_types(dynamic, partial_out=True),
            spec=_partial_spec,
            attributes=(*attributes, *_NUM_SPLITS),
        ),
        PluginDefinition(
            name=f"PagedAttentionCombine{suffix}",
            inputs=(*inputs, "partial"),
            outputs=_like_q,
            num_outputs=1,
            types=_types(dynamic, partial_in=True),
            spec=_combine_spec,
            attributes=(*attributes, *_NUM_SPLITS),
        ),
    )


PLUGINS = (*_plugins(dynamic=False), *_plugins(dynamic=True))

ATTENTIONS = tuple(plugin.name for plugin in PLUGINS if plugin.outputs is _like_q)
"""The plugins whose output is that of an attention: each attention of a network has one."""
