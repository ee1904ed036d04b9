"""LowRankKeyReconstruct as an ONNX function: one product for all lists, then the rotation of all keys."""

from onnx import FunctionProto

from plugins.low_rank_key_reconstruct import OPERATOR
from plugins.low_rank_key_reconstruct.onnx_lists import Lists
from plugins.onnx_body import FunctionBody
from plugins.onnx_cache import FLOAT
from plugins.onnx_node import Cache, OnnxNode
from plugins.onnx_rotation import rotate


def _body(cache: Cache) -> FunctionProto:
    body = FunctionBody()
    lists = Lists(body, page_size=body.size("u", 1))
    rank, dim = body.size("sv", 2), body.size("sv", 3)
    position = lists.tokens("chunks")
    factor = body.Gather(body.Reshape("u", body.shape(-1, rank)), lists.rows("shadow_table", position))
    by_head = body.shape(lists.sequences, lists.kv_heads, lists.of_head, rank)
    factor = body.Reshape(body.to(factor, FLOAT), by_head, allowzero=1)
    own = body.to(body.Gather("sv", body.Where(lists.owns, lists.slot, lists.zero)), FLOAT)
    count = body.Mul(body.Mul(lists.sequences, lists.kv_heads), lists.of_head)
    keys = body.Reshape(body.MatMul(factor, own), body.shape(count, 1, dim), allowzero=1)
    flat_position = body.Reshape(position, body.shape(-1))
    middle = body.constant([1])
    angles = (body.Unsqueeze(body.Gather(table, flat_position), middle) for table in ("cos", "sin"))
    by_head = body.shape(lists.sequences, lists.kv_heads, lists.of_head, dim)
    keys = body.CastLike(body.Reshape(rotate(body, keys, *angles), by_head, allowzero=1), "u")
    return body.function("LowRankKeyReconstruct", OPERATOR.tensors, [("keys", keys)], ("chunk_size",))


NODES = (
    OnnxNode(
        name="LowRankKeyReconstruct",
        inputs=OPERATOR.tensors,
        outputs=("keys",),
        attributes=OPERATOR.attributes,
        body=_body,
    ),
)
