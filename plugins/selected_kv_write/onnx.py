"""SelectedKvWrite as an ONNX function: all chunks of all lists at once, those behind a list's end left out."""

from onnx import FunctionProto

from plugins.onnx_body import Body, Value
from plugins.onnx_cache import FLOAT
from plugins.onnx_node import Cache, OnnxNode
from plugins.onnx_rotation import rotate
from plugins.selected_kv_write import FUNCTIONAL, OPERATOR


def _body(cache: Cache) -> FunctionProto:
    body = Body()
    zero = body.constant(0)
    chunk_size, page_size = body.int_attribute("chunk_size"), body.size("u", 1)
    rank, dim, kv_heads = (body.size("sv", index) for index in (2, 3, 1))
    sequences = body.size("slot", 0)
    of_head = body.Mul(body.size("chunks", 2), chunk_size)
    in_lists = body.shape(sequences, body.Mul(kv_heads, of_head))
    slot = body.to_int64("slot")
    owns = body.GreaterOrEqual(slot, zero)
    inside = body.range(zero, chunk_size)
    is_listed = body.And(
        body.GreaterOrEqual(body.to_int64("chunks"), zero), body.Unsqueeze(owns, body.constant([1, 2]))
    )

    def tokens(lists: str) -> Value:
        """Of each token of a list its number: [S, kv_heads * tokens]."""
        first = body.Mul(body.Where(is_listed, body.to_int64(lists), zero), chunk_size)
        each = body.Add(body.Unsqueeze(first, body.constant([3])), inside)
        return body.Reshape(each, in_lists, allowzero=1)

    found = body.Expand(body.Unsqueeze(is_listed, body.constant([3])), body.shape(1, 1, 1, chunk_size))
    found = body.Reshape(found, in_lists, allowzero=1)
    kept = body.Reshape(found, body.shape(-1))

    def rows(table: str, token: Value) -> Value:
        page = body.GatherElements(body.to_int64(table), body.Div(token, page_size), axis=1)
        return body.Where(found, body.Add(body.Mul(page, page_size), body.Mod(token, page_size)), zero)

    position = tokens("chunks")
    row, target = rows("shadow_table", position), rows("page_table", tokens("places"))
    per_head = body.shape(sequences, kv_heads, of_head)
    head = body.Unsqueeze(body.range(zero, kv_heads), body.constant([1]))

    def of_heads(index: Value) -> Value:
        """The rows of listed tokens in a tensor whose heads are rows of their own, flat."""
        numbers = body.Add(body.Mul(body.Reshape(index, per_head, allowzero=1), kv_heads), head)
        return body.Compress(body.Reshape(numbers, body.shape(-1)), kept, axis=0)

    factor = body.Gather(body.Reshape("u", body.shape(-1, rank)), row)
    factor = body.Reshape(body.to(factor, FLOAT), body.shape(sequences, kv_heads, of_head, rank), allowzero=1)
    own = body.to(body.Gather("sv", body.Where(owns, slot, zero)), FLOAT)
    count = body.Mul(body.Mul(sequences, kv_heads), of_head)
    keys = body.Reshape(body.MatMul(factor, own), body.shape(count, 1, dim), allowzero=1)
    flat_position = body.Reshape(position, body.shape(-1))
    middle = body.constant([1])
    angles = (body.Unsqueeze(body.Gather(table, flat_position), middle) for table in ("cos", "sin"))
    keys = body.Reshape(rotate(body, keys, *angles), body.shape(count, dim), allowzero=1)
    keys = body.CastLike(body.Compress(keys, kept, axis=0), "k_pool")
    values = body.Gather(body.Reshape("host_v", body.shape(-1, dim)), of_heads(row))
    places = body.Unsqueeze(of_heads(target), middle)

    def written(pool: str, value: Value) -> tuple[str, Value]:
        flat = body.Reshape(pool, body.shape(-1, dim))
        new = body.ScatterND(flat, places, value)
        return f"{pool}_out", body.Reshape(new, body.Shape(pool))

    outputs = [written("k_pool", keys), written("v_pool", values)]
    return body.function("SelectedKvWrite", OPERATOR.tensors, outputs, ("chunk_size",))


NODES = (
    OnnxNode(
        name="SelectedKvWrite",
        inputs=OPERATOR.tensors,
        outputs=("k_pool_out", "v_pool_out"),
        attributes=OPERATOR.attributes,
        body=_body,
        calls=FUNCTIONAL,
    ),
)
