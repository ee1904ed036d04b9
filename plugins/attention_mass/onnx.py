"""AttentionMass as two ONNX functions: each query's largest logit and total, then the new statistics.

Logits are in units of log 2, as the kernels' are. All queries meet all slots of their sequence's page table, and what
they do not see counts nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from onnx import FunctionProto

from plugins.attention_mass.functional import ADD, ADD_SQUARES, ADDED, COMMON, SCALES, TOTALS
from plugins.onnx_body import FunctionBody, Value
from plugins.onnx_cache import FLOAT, readable
from plugins.onnx_node import Cache, OnnxNode

_8_BIT = (Cache.E4M3, Cache.INT8)


@dataclass(frozen=True)
class _Step:
    """Values of T tokens, one that is none among them, and of L slots.

    `logits` [T + 1, kv_heads, group, L] in units of log 2, -inf where a query does not see a slot; `seen` [T + 1, L];
    `visible` [T + 1] slots that a query sees; `is_observed` [T + 1]; `of_sequence` [S, T + 1] float32, 1 where a token
    is observed and of the sequence; `slot` [L].
    """

    logits: Value
    seen: Value
    visible: Value
    is_observed: Value
    of_sequence: Value
    slot: Value
    num_tokens: Value


def _step(body: FunctionBody, cache: Cache, dynamic: bool) -> _Step:
    zero, one, first = body.constant(0), body.constant(1), body.constant([0])
    last = body.constant([1])
    tokens, heads, dim = (body.size("q", index) for index in range(3))
    pool = readable(body, "k_pool", cache)
    page_size, kv_heads = body.size(pool, 1), body.size(pool, 2)
    sequences, columns = body.size("page_table", 0), body.size("page_table", 1)
    starts, lengths = body.to_int64("query_start"), body.to_int64("kv_length")
    # A token and a sequence are added and dropped again, because onnxruntime reduces no empty tensor.
    token = body.range(zero, body.Add(tokens, one))
    ends = body.rows(starts, one, body.Add(sequences, one))
    passed = body.LessOrEqual(body.Unsqueeze(ends, first), body.Unsqueeze(token, last))
    padded = body.Concat(body.to_int64(passed), body.Expand(zero, body.shape(body.Add(tokens, one), 1)), axis=1)
    sequence = body.ReduceSum(padded, last, keepdims=0)  # the one that is none is that behind all

    def of_token(value: Value, other: int = 0) -> Value:
        return body.Gather(body.Concat(value, body.constant([other]), axis=0), sequence)

    begin, end, length = of_token(body.rows(starts, zero, sequences)), of_token(ends), of_token(lengths)
    skipped = of_token(body.to_int64("skipped"))
    has_state = body.GreaterOrEqual(body.Gather(body.to_int64("state_table"), zero, axis=1), zero)
    with_state = body.Greater(of_token(body.to_int64(has_state)), zero)
    is_observed = body.And(body.GreaterOrEqual(token, body.Add(begin, skipped)), with_state)
    is_observed = body.And(is_observed, body.Less(sequence, sequences))
    visible = body.Add(body.Add(body.Sub(length, end), token), one)

    slot = body.range(zero, body.Mul(columns, page_size))
    seen = body.And(
        body.Less(body.Unsqueeze(slot, first), body.Unsqueeze(visible, last)), body.Unsqueeze(is_observed, last)
    )
    table = body.Concat(body.to_int64("page_table"), body.Expand(zero, body.shape(1, columns)), axis=0)
    exists = body.Less(body.Unsqueeze(slot, first), body.Unsqueeze(body.Concat(lengths, first, axis=0), last))
    page = body.Where(exists, body.Gather(table, body.Div(slot, page_size), axis=1), zero)
    row = body.Add(body.Mul(page, page_size), body.Mod(slot, page_size))
    flat = body.Reshape(pool, body.shape(-1, kv_heads, dim))
    keys = body.to(body.Gather(flat, row), FLOAT)
    if dynamic:
        scales = body.Gather(body.Reshape("k_scales", body.shape(-1, kv_heads)), row)
        keys = body.Mul(keys, body.Unsqueeze(scales, body.constant([3])))
    elif cache is not Cache.FLOAT:
        keys = body.Mul(keys, body.float_attribute("k_scale"))
    keys = body.Where(body.Unsqueeze(exists, body.constant([2, 3])), keys, body.constant(0.0, np.float32))
    nothing = body.Expand(body.constant(0.0, np.float32), body.shape(1, heads, dim))
    queries = body.Concat(body.to("q", FLOAT), nothing, axis=0)
    shape = body.shape(body.Add(tokens, one), kv_heads, body.Div(heads, kv_heads), dim)
    of_each = body.Transpose(body.Gather(keys, sequence), perm=[0, 2, 3, 1])
    scale = body.Div(body.float_attribute("scale"), body.constant(math.log(2), np.float32))
    logits = body.Mul(body.MatMul(body.Reshape(queries, shape), of_each), scale)
    logits = body.Where(body.Unsqueeze(seen, body.constant([1, 2])), logits, body.constant(-np.inf, np.float32))
    numbers = body.Unsqueeze(body.range(zero, sequences), last)
    same = body.And(body.Equal(numbers, body.Unsqueeze(sequence, first)), body.Unsqueeze(is_observed, first))
    return _Step(logits, seen, visible, is_observed, body.to(same, FLOAT), slot, tokens)


def _totals(cache: Cache, dynamic: bool) -> FunctionProto:
    body = FunctionBody()
    step, last = _step(body, cache, dynamic), body.constant([3])
    infinite = body.constant(-np.inf, np.float32)
    top = body.ReduceMax(step.logits, last)
    top = body.Where(body.Equal(top, infinite), body.constant(0.0, np.float32), top)
    total = body.ReduceSum(body.Pow(body.constant(2.0, np.float32), body.Sub(step.logits, top)), last)
    shape = body.shape(body.Add(step.num_tokens, body.constant(1)), body.size("q", 1), 2)
    both = body.rows(body.Reshape(body.Concat(top, total, axis=3), shape), body.constant(0), step.num_tokens)
    name = "AttentionMassTotalsDynamic" if dynamic else "AttentionMassTotals"
    return body.function(name, _inputs(COMMON, dynamic), [("totals", both)], _attributes(dynamic, "scale"))


def _add(cache: Cache, dynamic: bool, with_squares: bool) -> FunctionProto:
    body = FunctionBody()
    step = _step(body, cache, dynamic)
    zero, nothing = body.constant(0), body.constant(0.0, np.float32)
    kv_heads, page_size = body.size("mass", 2), body.size("mass", 1)
    sequences, num_slots, padded = body.size("page_table", 0), body.size(step.slot, 0), body.size(step.seen, 0)
    group = body.Div(body.size("q", 1), kv_heads)
    shape = body.shape(padded, kv_heads, group, 2)
    more = body.Expand(body.constant(1.0, np.float32), body.shape(1, body.size("q", 1), 2))
    totals = body.Reshape(body.Concat("totals", more, axis=0), shape)
    top, total = (body.Unsqueeze(body.Gather(totals, body.constant(i), axis=3), body.constant([3])) for i in (0, 1))
    power = body.Pow(body.constant(2.0, np.float32), body.Sub(step.logits, top))
    weight = body.ReduceMean(body.Div(power, total), body.constant([2]), keepdims=0)  # [T + 1, kv_heads, L]
    seen = body.Unsqueeze(step.seen, body.constant([1]))

    state, last_column = body.to_int64("state_table"), body.Sub(body.size("state_table", 1), body.constant(1))
    page = body.Gather(state, body.Min(body.Div(step.slot, page_size), last_column), axis=1)  # [S, L]
    is_written = body.And(
        body.Less(body.Unsqueeze(step.slot, body.constant([0])), _column(body, body.to_int64("kv_length"))),
        body.Greater(_column(body, body.ReduceSum(step.of_sequence, body.constant([1]), keepdims=0)), nothing),
    )
    place = body.Add(body.Mul(page, page_size), body.Mod(step.slot, page_size))
    place = body.Where(is_written, place, zero)
    is_kept = body.Less(body.Unsqueeze(step.slot, body.constant([0])), _column(body, body.to_int64("scored")))
    is_kept = body.Unsqueeze(body.And(is_kept, is_written), body.constant([2]))
    flat_place = body.Compress(body.Reshape(place, body.shape(-1)), body.Reshape(is_written, body.shape(-1)), axis=0)

    def before(pool: str) -> Value:
        found = body.Gather(body.Reshape(pool, body.shape(-1, kv_heads)), place)
        return body.Transpose(body.Where(is_kept, found, nothing), perm=[0, 2, 1])  # [S, kv_heads, L]

    def summed(value: Value) -> Value:
        given = body.Reshape(body.Where(seen, value, nothing), body.shape(padded, -1))
        return body.Reshape(body.MatMul(step.of_sequence, given), body.shape(sequences, kv_heads, num_slots))

    def written(pool: str, value: Value) -> Value:
        rows = body.Reshape(body.Transpose(value, perm=[0, 2, 1]), body.shape(-1, kv_heads))
        rows = body.Compress(rows, body.Reshape(is_written, body.shape(-1)), axis=0)
        flat = body.Reshape(pool, body.shape(-1, kv_heads))
        result = body.ScatterND(flat, body.Unsqueeze(flat_place, body.constant([1])), rows)
        return body.Reshape(result, body.Shape(pool))

    sums = body.Add(before("mass"), summed(weight))
    ending = "Dynamic" if dynamic else ""
    if with_squares:
        squares = body.Add(before("squares"), summed(body.Mul(weight, weight)))
        outputs = [("mass_out", written("mass", sums)), ("squares_out", written("squares", squares))]
        name, inputs = f"AttentionMassAddSquares{ending}", _inputs((*ADDED, "squares"), dynamic)
        return body.function(name, inputs, outputs, _attributes(dynamic, "scale"))
    mean = body.Div(body.constant(1.0, np.float32), body.to(step.visible, FLOAT))
    below = body.to(body.Less(weight, body.Unsqueeze(mean, body.constant([1, 2]))), FLOAT)
    counts = body.Add(before("mass"), summed(below))
    of_one = body.Greater(body.Unsqueeze(step.of_sequence, body.constant([2, 3])), nothing)
    given = body.Where(body.And(of_one, body.Unsqueeze(seen, body.constant([0]))), weight, nothing)
    highest = body.Max(before("mass"), body.ReduceMax(given, body.constant([1]), keepdims=0))
    kind = body.int_attribute("kind")
    result = body.Where(body.Equal(kind, body.constant(3)), highest, sums)
    result = body.Where(body.Equal(kind, body.constant(2)), counts, result)
    attributes = _attributes(dynamic, "scale", "kind")
    outputs = [("mass_out", written("mass", result))]
    return body.function(f"AttentionMassAdd{ending}", _inputs(ADDED, dynamic), outputs, attributes)


def _column(body: FunctionBody, value: Value) -> Value:
    return body.Unsqueeze(value, body.constant([1]))


def _inputs(names: Sequence[str], dynamic: bool) -> tuple[str, ...]:
    return (*names, *(SCALES if dynamic else ()))


def _attributes(dynamic: bool, *names: str) -> tuple[str, ...]:
    return names if dynamic else (*names, "k_scale")


def _nodes(dynamic: bool) -> tuple[OnnxNode, ...]:
    ending, caches = ("Dynamic", _8_BIT) if dynamic else ("", (Cache.FLOAT, *_8_BIT))
    k_scale = () if dynamic else (("k_scale", float),)
    return (
        OnnxNode(
            name=f"AttentionMassTotals{ending}",
            inputs=_inputs(COMMON, dynamic),
            outputs=("totals",),
            attributes=(("scale", float), *k_scale),
            body=lambda cache: _totals(cache, dynamic),
            caches=caches,
            calls=TOTALS,
        ),
        OnnxNode(
            name=f"AttentionMassAdd{ending}",
            inputs=_inputs(ADDED, dynamic),
            outputs=("mass_out",),
            attributes=(("scale", float), ("kind", int), *k_scale),
            body=lambda cache: _add(cache, dynamic, with_squares=False),
            caches=caches,
            calls=ADD,
        ),
        OnnxNode(
            name=f"AttentionMassAddSquares{ending}",
            inputs=_inputs((*ADDED, "squares"), dynamic),
            outputs=("mass_out", "squares_out"),
            attributes=(("scale", float), *k_scale),
            body=lambda cache: _add(cache, dynamic, with_squares=True),
            caches=caches,
            calls=ADD_SQUARES,
        ),
    )


NODES = (*_nodes(dynamic=False), *_nodes(dynamic=True))
