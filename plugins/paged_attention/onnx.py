"""PagedAttention and PagedAttentionDynamic as ONNX functions: a loop over sequences that gathers used pages only."""

import numpy as np
from onnx import FunctionProto

from plugins.onnx_body import FunctionBody, Value
from plugins.onnx_cache import FLOAT, readable
from plugins.onnx_node import Cache, OnnxNode
from plugins.onnx_pairs import out_of_pairs, rotate_blocks
from plugins.paged_attention import OPERATOR

_INPUTS, _SCALES = OPERATOR.tensors, ("k_scales", "v_scales")
_DYNAMIC = ("scale", "window")
_STATIC = (*_DYNAMIC, "k_scale", "v_scale")


def _body(cache: Cache, dynamic: bool) -> FunctionProto:
    body = FunctionBody()
    tokens, heads, head_dim = (body.size("q", dim) for dim in range(3))
    pools = {name: readable(body, f"{name}_pool", cache) for name in "kv"}
    page_size, kv_heads = body.size(pools["k"], 1), body.size(pools["k"], 2)
    group = body.Div(heads, kv_heads)
    queries, stored_dim = body.to("q", FLOAT), body.size(pools["k"], 3)
    if cache is Cache.INT4:
        queries = body.to(body.CastLike(rotate_blocks(body, queries, head_dim), "q"), FLOAT)
    q = body.Reshape(queries, body.shape(tokens, kv_heads, group, head_dim), allowzero=1)
    starts, lengths, table = (body.to_int64(name) for name in ("query_start", "kv_length", "page_table"))
    scale, window = body.float_attribute("scale"), body.int_attribute("window")
    factors = {} if dynamic or cache is Cache.FLOAT else {name: body.float_attribute(f"{name}_scale") for name in "kv"}
    zero, one = body.constant(0), body.constant(1)
    windowed = body.Greater(window, zero)

    active = body.nonempty(starts)

    def sequence(inner: FunctionBody, i: Value, attended: Value) -> Value:
        s = inner.Gather(active, i)
        begin, end = inner.Gather(starts, s), inner.Gather(starts, inner.Add(s, one))
        count = inner.Sub(end, begin)
        length = inner.Gather(lengths, s)
        oldest = inner.Max(inner.Add(inner.Sub(inner.Sub(length, count), window), one), zero)
        first_key = inner.Where(windowed, oldest, zero)
        first_page = inner.Div(first_key, page_size)
        end_page = inner.Div(inner.Sub(inner.Add(length, page_size), one), page_size)
        pages = inner.rows(inner.Gather(table, s), first_page, end_page)
        num_slots = inner.Mul(inner.Sub(end_page, first_page), page_size)
        begin_slot = inner.Sub(first_key, inner.Mul(first_page, page_size))
        end_slot = inner.Sub(length, inner.Mul(first_page, page_size))

        def values(name: str) -> Value:
            """[kv_heads, 1, keys, head_dim] float32."""
            slots = inner.Reshape(
                inner.Gather(pools[name], pages), inner.shape(num_slots, kv_heads, stored_dim), allowzero=1
            )
            rows = inner.rows(slots, begin_slot, end_slot)
            stored = out_of_pairs(inner, rows) if cache is Cache.INT4 else inner.to(rows, FLOAT)
            if dynamic:
                scales = inner.Reshape(
                    inner.Gather(f"{name}_scales", pages), inner.shape(num_slots, kv_heads, 1), allowzero=1
                )
                stored = inner.Mul(stored, inner.rows(scales, begin_slot, end_slot))
            elif factors:
                stored = inner.Mul(stored, factors[name])
            return inner.Unsqueeze(inner.Transpose(stored, perm=[1, 0, 2]), inner.constant([1]))

        queries = inner.Transpose(inner.rows(q, begin, end), perm=[1, 2, 0, 3])
        score = inner.Mul(inner.MatMul(queries, inner.Transpose(values("k"), perm=[0, 1, 3, 2])), scale)
        position = inner.Unsqueeze(inner.range(inner.Sub(length, count), length), inner.constant([1]))
        key = inner.range(first_key, length)
        too_old = inner.And(windowed, inner.LessOrEqual(key, inner.Sub(position, window)))
        hidden = inner.Or(inner.Greater(key, position), too_old)
        masked = inner.Where(hidden, inner.constant(-np.inf, np.float32), score)
        result = inner.MatMul(inner.Softmax(masked, axis=-1), values("v"))
        by_token = inner.Transpose(result, perm=[2, 0, 1, 3])
        return inner.Concat(attended, inner.Reshape(by_token, inner.shape(count, heads, head_dim), allowzero=1), axis=0)

    nothing = body.to(body.rows("q", zero, zero), FLOAT)
    attended = body.loop(body.size(active, 0), nothing, 3, sequence)
    if cache is Cache.INT4:
        attended = rotate_blocks(body, attended, head_dim)
    result = [("attended", body.CastLike(attended, "q"))]
    if dynamic:
        return body.function("PagedAttentionDynamic", (*_INPUTS, *_SCALES), result, _DYNAMIC)
    return body.function("PagedAttention", _INPUTS, result, _STATIC)


NODES = (
    OnnxNode(
        name="PagedAttention",
        inputs=_INPUTS,
        outputs=("attended",),
        attributes=OPERATOR.typed(*_STATIC),
        body=lambda cache: _body(cache, dynamic=False),
        caches=(Cache.FLOAT, Cache.E4M3, Cache.INT8),
    ),
    OnnxNode(
        name="PagedAttentionDynamic",
        inputs=(*_INPUTS, *_SCALES),
        outputs=("attended",),
        attributes=OPERATOR.typed(*_DYNAMIC),
        body=lambda cache: _body(cache, dynamic=True),
        caches=(Cache.E4M3, Cache.INT8, Cache.INT4),
    ),
)
