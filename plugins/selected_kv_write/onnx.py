"""SelectedKvWrite as two ONNX functions: LowRankKeyReconstruct, and what puts keys and values in their places."""

from onnx import FunctionProto

from plugins.low_rank_key_reconstruct.onnx import NODES as RECONSTRUCT
from plugins.low_rank_key_reconstruct.onnx_lists import Lists
from plugins.onnx_body import FunctionBody, Value
from plugins.onnx_node import Cache, OnnxNode
from plugins.selected_kv_write.functional import PLACE, PLACED


def _place(cache: Cache) -> FunctionProto:
    body = FunctionBody()
    lists = Lists(body, page_size=body.size("k_pool", 1))
    dim = body.size("keys", 3)
    kept = body.Reshape(lists.found, body.shape(-1))
    per_head = body.shape(lists.sequences, lists.kv_heads, lists.of_head)
    head = body.Unsqueeze(body.range(lists.zero, lists.kv_heads), body.constant([1]))

    def of_heads(index: Value) -> Value:
        """The rows of listed tokens in a tensor whose heads are rows of their own, flat."""
        numbers = body.Add(body.Mul(body.Reshape(index, per_head, allowzero=1), lists.kv_heads), head)
        return body.Compress(body.Reshape(numbers, body.shape(-1)), kept, axis=0)

    source = of_heads(lists.rows("shadow_table", lists.tokens("chunks")))
    target = body.Unsqueeze(of_heads(lists.rows("page_table", lists.tokens("places"))), body.constant([1]))
    listed = body.Compress(body.range(lists.zero, body.size(kept, 0)), kept, axis=0)
    keys = body.Gather(body.Reshape("keys", body.shape(-1, dim)), listed)
    values = body.Gather(body.Reshape("host_v", body.shape(-1, dim)), source)

    def written(pool: str, value: Value) -> tuple[str, Value]:
        new = body.ScatterND(body.Reshape(pool, body.shape(-1, dim)), target, value)
        return f"{pool}_out", body.Reshape(new, body.Shape(pool))

    outputs = [written("k_pool", keys), written("v_pool", values)]
    return body.function("SelectedKvPlace", PLACED, outputs, ("chunk_size",))


NODES = (
    *RECONSTRUCT,
    OnnxNode(
        name="SelectedKvPlace",
        inputs=PLACED,
        outputs=("k_pool_out", "v_pool_out"),
        attributes=(("chunk_size", int),),
        body=_place,
        calls=PLACE,
    ),
)
