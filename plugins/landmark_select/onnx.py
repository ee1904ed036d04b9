"""LandmarkSelect as two ONNX functions: the logits of all chunks, then the choice of each KV head."""

import numpy as np
from onnx import FunctionProto, TensorProto

from plugins.landmark_select import CHOOSE, OPERATOR, SCORES
from plugins.onnx_body import FunctionBody, Value
from plugins.onnx_cache import FLOAT
from plugins.onnx_node import Cache, OnnxNode

_SCORES = OPERATOR.tensors[:-1]
_CHOOSE = ("scores", *OPERATOR.tensors[-2:])
_LOWEST = float(np.finfo(np.float32).min)


def _scores(cache: Cache) -> FunctionProto:
    body = FunctionBody()
    zero, one = body.constant(0), body.constant(1)
    infinite = body.constant(-np.inf, np.float32)
    sequences, tokens, heads = body.size("num_chunks", 0), body.size("q", 0), body.size("q", 1)
    chunks_per_page, kv_heads = body.size("landmarks", 1), body.size("landmarks", 2)
    starts, table = body.to_int64("query_start"), body.to_int64("table")
    begins, ends = body.rows(starts, zero, sequences), body.rows(starts, one, body.Add(sequences, one))
    asked = body.Less(begins, ends)
    nothing = body.Expand(body.constant(0.0, np.float32), body.shape(1, heads, body.size("q", 2)))
    queries = body.Concat(body.to("q", FLOAT), nothing, axis=0)  # the row of zeros for sequences without a query
    query = body.Gather(queries, body.Where(asked, body.Sub(ends, one), tokens))

    total = body.Mul(body.size("table", 1), chunks_per_page)
    chunk = body.range(zero, total)
    column = body.constant([1])
    counts = body.Where(asked, body.to_int64("num_chunks"), zero)
    present = body.Less(body.Unsqueeze(chunk, body.constant([0])), body.Unsqueeze(counts, column))
    page = body.Gather(table, body.Div(chunk, chunks_per_page), axis=1)
    row = body.Add(body.Mul(page, chunks_per_page), body.Mod(chunk, chunks_per_page))
    row = body.Where(present, row, zero)

    def gathered(name: str, *rest: Value) -> Value:
        return body.Gather(body.Reshape(name, body.shape(-1, kv_heads, *rest)), row)

    keys = body.Transpose(body.to(gathered("landmarks", body.size("q", 2)), FLOAT), perm=[0, 2, 3, 1])
    grouped = body.Reshape(query, body.shape(sequences, kv_heads, body.Div(heads, kv_heads), body.size("q", 2)))
    logits = body.Mul(body.MatMul(grouped, keys), body.float_attribute("scale"))
    kept = body.Not(body.to(gathered("is_outlier"), TensorProto.BOOL))
    kept = body.Transpose(body.And(kept, body.Unsqueeze(present, body.constant([2]))), perm=[0, 2, 1])
    lowest = body.Where(body.Equal(logits, infinite), body.constant(_LOWEST, np.float32), logits)
    scores = body.Where(body.Unsqueeze(kept, body.constant([2])), lowest, infinite)
    flat = body.Reshape(scores, body.shape(sequences, heads, total))
    return body.function("LandmarkSelectScores", _SCORES, [("scores", flat)], ("scale",))


def _choose(cache: Cache) -> FunctionProto:
    body = FunctionBody()
    zero, lowest = body.constant(0), body.constant(_LOWEST, np.float32)
    infinite = body.constant(-np.inf, np.float32)
    kv_heads, max_selected = body.int_attribute("kv_heads"), body.int_attribute("max_selected")
    sequences, heads, total = (body.size("scores", dim) for dim in range(3))
    padded_sequences = body.Add(sequences, body.constant(1))
    # One sequence is added and dropped again, because onnxruntime reduces no empty tensor.
    more = body.Expand(body.constant(0.0, np.float32), body.shape(1, heads, total))
    logits = body.Concat("scores", more, axis=0)
    wanted = body.Concat(body.to_int64("num_selected"), body.constant([0]), axis=0)
    shape = body.shape(padded_sequences, kv_heads, body.Div(heads, kv_heads), total)
    logarithm = body.LogSoftmax(logits, axis=-1)
    score = body.Max(body.Where(body.IsNaN(logarithm), lowest, logarithm), lowest)
    best = body.ReduceMax(body.Reshape(score, shape), body.constant([2]), keepdims=0)
    excluded = body.Equal(body.Gather(body.Reshape(logits, shape), zero, axis=2), infinite)
    count = body.Min(max_selected, total)
    values, index = body.TopK(body.Where(excluded, infinite, best), body.shape(count), outputs=2)
    rank = body.range(zero, count)
    taken = body.And(body.Less(rank, body.Unsqueeze(wanted, body.constant([1, 2]))), body.Greater(values, infinite))
    largest = body.constant(2**62)
    ascending, _ = body.TopK(body.Where(taken, index, largest), body.shape(count), largest=0, outputs=2)
    chunks = body.Where(body.Equal(ascending, largest), body.constant(-1), ascending)
    rest = body.shape(padded_sequences, kv_heads, body.Sub(max_selected, count))
    padded = body.Concat(chunks, body.Expand(body.constant(-1), rest), axis=2)
    selected = body.to(body.rows(padded, zero, sequences), TensorProto.INT32)
    return body.function("LandmarkSelectChoose", _CHOOSE, [("selected", selected)], ("kv_heads", "max_selected"))


NODES = (
    OnnxNode(
        name="LandmarkSelectScores",
        inputs=_SCORES,
        outputs=("scores",),
        attributes=OPERATOR.typed("scale"),
        body=_scores,
        calls=SCORES,
    ),
    OnnxNode(
        name="LandmarkSelectChoose",
        inputs=_CHOOSE,
        outputs=("selected",),
        attributes=(("kv_heads", int), *OPERATOR.typed("max_selected")),
        sizes={"kv_heads": ("landmarks", 2)},
        body=_choose,
        calls=CHOOSE,
    ),
)
