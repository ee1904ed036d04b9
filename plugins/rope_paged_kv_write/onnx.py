"""RopePagedKvWrite and RopePagedKvWriteDynamic as ONNX functions; the pools come in and go out."""

from onnx import FunctionProto

from plugins.onnx_body import FunctionBody
from plugins.onnx_cache import FLOAT, quantize, row_scale, writable
from plugins.onnx_node import Cache, OnnxNode
from plugins.onnx_pairs import rotate_blocks
from plugins.onnx_rotation import rotate
from plugins.rope_paged_kv_write import OPERATOR

_INPUTS, _SCALES = OPERATOR.tensors, OPERATOR.optional_tensors
_STATIC = ("k_scale", "v_scale")


def _body(cache: Cache, dynamic: bool) -> FunctionProto:
    body = FunctionBody()
    slot_mapping = body.to_int64("slot_mapping")
    written = body.GreaterOrEqual(slot_mapping, body.constant(0))
    slots = body.Compress(slot_mapping, written, axis=0)
    opened = {name: writable(body, f"{name}_pool", cache) for name in "kv"}
    page_size = body.size(opened["k"][0], 1)
    heads = body.constant([1])
    places = body.Concat(
        body.Unsqueeze(body.Div(slots, page_size), heads), body.Unsqueeze(body.Mod(slots, page_size), heads), axis=1
    )
    k, v, cos, sin = (body.Compress(body.to(x, FLOAT), written, axis=0) for x in _INPUTS[:4])
    rotated = rotate(body, k, body.Unsqueeze(cos, heads), body.Unsqueeze(sin, heads))
    pools, scales = [], []
    head_dim = body.size("k", 2)
    for name, x in (("k", rotated), ("v", v)):
        x = rotate_blocks(body, x, head_dim) if cache is Cache.INT4 else x
        if dynamic:
            scale = row_scale(body, x, cache)
            row = body.Squeeze(scale, body.constant([2]))
            scales.append((f"{name}_scales_out", body.ScatterND(f"{name}_scales", places, row)))
            stored = quantize(body, x, scale, cache)
        elif cache is not Cache.FLOAT:
            stored = quantize(body, x, body.float_attribute(f"{name}_scale"), cache)
        else:
            stored = body.CastLike(x, f"{name}_pool")
        before, close = opened[name]
        pools.append((f"{name}_pool_out", close(body.ScatterND(before, places, stored))))
    if dynamic:
        return body.function("RopePagedKvWriteDynamic", (*_INPUTS, *_SCALES), [*pools, *scales])
    return body.function("RopePagedKvWrite", _INPUTS, pools, _STATIC)


NODES = (
    OnnxNode(
        name="RopePagedKvWrite",
        inputs=_INPUTS,
        outputs=("k_pool_out", "v_pool_out"),
        attributes=OPERATOR.typed(*_STATIC),
        calls="rope_paged_kv_write_functional",
        body=lambda cache: _body(cache, dynamic=False),
        caches=(Cache.FLOAT, Cache.E4M3, Cache.INT8),
    ),
    OnnxNode(
        name="RopePagedKvWriteDynamic",
        inputs=(*_INPUTS, *_SCALES),
        outputs=("k_pool_out", "v_pool_out", "k_scales_out", "v_scales_out"),
        calls="rope_paged_kv_write_dynamic_functional",
        body=lambda cache: _body(cache, dynamic=True),
        caches=(Cache.E4M3, Cache.INT8, Cache.INT4),
    ),
)
