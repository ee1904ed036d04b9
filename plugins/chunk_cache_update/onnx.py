"""ChunkCacheUpdate as an ONNX function: which chunks are missed and which places are free, paired by their ranks."""

from onnx import FunctionProto, TensorProto

from plugins.chunk_cache_update import FUNCTIONAL, OPERATOR
from plugins.onnx_body import FunctionBody, Value
from plugins.onnx_node import Cache, OnnxNode

_LAST = 2


def _body(cache: Cache) -> FunctionProto:
    body = FunctionBody()
    zero, one, none = body.constant(0), body.constant(1), body.constant(-1)
    slot = body.to_int64("slot")
    owns = body.GreaterOrEqual(slot, zero)
    row = body.Where(owns, slot, zero)
    of_each = body.Unsqueeze(owns, body.constant([1, 2]))
    wanted = body.Where(of_each, body.to_int64("selected"), none)
    held = body.Where(of_each, body.Gather(body.to_int64("cached"), row), none)
    is_wanted = body.GreaterOrEqual(wanted, zero)
    same = body.And(
        body.Equal(body.Unsqueeze(wanted, body.constant([3])), body.Unsqueeze(held, body.constant([2]))),
        body.Unsqueeze(is_wanted, body.constant([3])),
    )
    hits = body.to_int64(same)
    is_missed = body.And(is_wanted, body.Equal(body.ReduceSum(hits, body.constant([3]), keepdims=0), zero))
    is_free = body.And(body.Equal(body.ReduceSum(hits, body.constant([2]), keepdims=0), zero), of_each)
    rank = body.range(zero, body.size("selected", _LAST))

    def ranked(value: Value, given: Value) -> Value:
        """At each rank the value there: [S, kv_heads, n]."""
        number = body.Sub(body.CumSum(body.to_int64(given), body.constant(_LAST)), one)
        at = body.And(
            body.Equal(body.Unsqueeze(number, body.constant([2])), body.Unsqueeze(rank, body.constant([1]))),
            body.Unsqueeze(given, body.constant([2])),
        )
        return body.ReduceSum(
            body.Mul(body.to_int64(at), body.Unsqueeze(value, body.constant([2]))), body.constant([3]), keepdims=0
        )

    count = body.ReduceSum(body.to_int64(is_missed), body.constant([2]), keepdims=1)
    is_brought = body.Less(rank, count)
    chunks = body.Where(is_brought, ranked(wanted, is_missed), none)
    places = body.Where(is_brought, ranked(body.Expand(rank, body.Shape(held)), is_free), none)

    free_rank = body.Sub(body.CumSum(body.to_int64(is_free), body.constant(_LAST)), one)
    is_taken = body.And(is_free, body.Less(free_rank, count))
    brought = body.GatherElements(chunks, body.Max(free_rank, zero), axis=_LAST)
    new = body.to(body.Where(is_taken, brought, body.Gather(body.to_int64("cached"), row)), TensorProto.INT32)
    asked = body.ReduceSum(body.to_int64(is_wanted), body.constant([2]), keepdims=1)
    added = body.Concat(asked, body.Sub(asked, count), axis=2)
    target = body.Unsqueeze(body.Compress(slot, owns, axis=0), body.constant([1]))

    def written(pool: str, rows: Value) -> Value:
        return body.ScatterND(pool, target, body.Compress(rows, owns, axis=0))

    outputs = [
        ("chunks", body.to(chunks, TensorProto.INT32)),
        ("places", body.to(places, TensorProto.INT32)),
        ("cached_out", written("cached", new)),
        ("counts_out", written("counts", body.Add(body.Gather("counts", row), added))),
    ]
    return body.function("ChunkCacheUpdate", OPERATOR.tensors, outputs)


NODES = (
    OnnxNode(
        name="ChunkCacheUpdate",
        inputs=OPERATOR.tensors,
        outputs=("chunks", "places", "cached_out", "counts_out"),
        body=_body,
        calls=FUNCTIONAL,
    ),
)
