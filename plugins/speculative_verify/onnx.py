"""SpeculativeVerify as an ONNX function: all rows at once, greedy and sampled, then a choice by temperature.

Shapes: D drafts, S sequences, D+S rows. Sequence s has the rows from draft_start[s] + s on.
"""

import numpy as np
from onnx import FunctionProto, TensorProto

from plugins.onnx_body import FunctionBody, Value
from plugins.onnx_node import Cache, OnnxNode
from plugins.speculative_verify import OPERATOR


def _count_at_most(body: FunctionBody, begins: Value, index: Value) -> Value:
    """How many of `begins` [S] are at most each `index` [n]; one of each is added so that nothing is empty."""
    more = body.Concat(begins, body.constant([2**62]), axis=0)
    indices = body.Unsqueeze(body.Concat(index, body.constant([0]), axis=0), body.constant([1]))
    counts = body.ReduceSum(body.to_int64(body.LessOrEqual(more, indices)), body.constant([1]), keepdims=0)
    return body.rows(counts, body.constant(0), body.size(index, 0))


def _draw(body: FunctionBody, weight: Value, uniform: Value) -> Value:
    """The lowest token of positive weight whose cumulative weight is above uniform * sum, per row of [S, vocab]."""
    axis = body.constant([1])
    cumulative = body.CumSum(body.to(weight, TensorProto.DOUBLE), body.constant(1))
    total = body.Slice(cumulative, body.constant([-1]), body.constant([np.iinfo(np.int64).max]), axis)
    target = body.Mul(body.Unsqueeze(body.to(uniform, TensorProto.DOUBLE), axis), total)
    above = body.And(body.Greater(cumulative, target), body.Greater(weight, body.constant(0.0, np.float32)))
    return body.ArgMax(body.to(above, TensorProto.INT32), axis=1, keepdims=0)


def _body(cache: Cache) -> FunctionProto:
    body = FunctionBody()
    zero, one, columns = body.constant(0), body.constant(1), body.constant([1])
    no_weight = body.constant(0.0, np.float32)
    num_drafts, num_sequences = body.size("draft_ids", 0), body.size("temperature", 0)
    starts, drafts = body.to_int64("draft_start"), body.to_int64("draft_ids")
    begins = body.rows(starts, zero, num_sequences)
    ends = body.rows(starts, one, body.Add(num_sequences, one))
    sequences, draft_index = body.range(zero, num_sequences), body.range(zero, num_drafts)

    row_index = body.range(zero, body.Add(num_drafts, num_sequences))
    sequence_of_row = body.Sub(_count_at_most(body, body.Add(begins, sequences), row_index), one)
    is_greedy = body.Equal("temperature", no_weight)
    divisor = body.Where(is_greedy, body.constant(1.0, np.float32), "temperature")
    scaled = body.Div("logits", body.Unsqueeze(body.Gather(divisor, sequence_of_row), columns))
    probs = body.Softmax(scaled, axis=-1)
    best = body.ArgMax("logits", axis=1, keepdims=0, select_last_index=0)

    # begins may repeat where a sequence has no draft; the count of ends that are passed skips those.
    sequence_of_draft = _count_at_most(body, ends, draft_index)
    draft_row = body.Add(draft_index, sequence_of_draft)
    place = body.Concat(body.Unsqueeze(draft_row, columns), body.Unsqueeze(drafts, columns), axis=1)
    draft_place = body.Concat(body.Unsqueeze(draft_index, columns), body.Unsqueeze(drafts, columns), axis=1)
    target_prob = body.GatherND(probs, place)
    num_proposals = body.size("draft_probs", 0)
    has_proposals = body.Greater(num_proposals, zero)
    proposal_prob = body.choose(
        has_proposals,
        lambda inner: inner.GatherND("draft_probs", draft_place),
        lambda inner: inner.Add(
            inner.Mul(target_prob, inner.constant(0.0, np.float32)), inner.constant(1.0, np.float32)
        ),
        rank=1,
    )
    threshold = body.Gather(body.Gather("uniform", zero, axis=1), draft_row)
    greedy_draft = body.Gather(is_greedy, sequence_of_draft)
    is_accepted = body.Or(
        body.And(greedy_draft, body.Equal(body.Gather(best, draft_row), drafts)),
        body.And(body.Not(greedy_draft), body.Less(body.Mul(threshold, proposal_prob), target_prob)),
    )

    # The first draft of each sequence that is not accepted, its end if there is none.
    end = body.Unsqueeze(ends, columns)
    in_sequence = body.And(
        body.GreaterOrEqual(draft_index, body.Unsqueeze(begins, columns)), body.Less(draft_index, end)
    )
    rejected = body.to(body.And(in_sequence, body.Not(is_accepted)), TensorProto.INT32)
    sentinel = body.Expand(body.constant([[1]], np.int32), body.shape(num_sequences, 1))
    stop = body.Min(body.ArgMax(body.Concat(rejected, sentinel, axis=1), axis=1, keepdims=0), ends)
    accepted = body.Sub(stop, begins)

    row = body.Add(stop, sequences)
    p = body.Gather(probs, row)
    padded = body.Concat(drafts, body.constant([0]), axis=0)
    proposal = body.choose(
        has_proposals,
        lambda inner: inner.Gather("draft_probs", inner.Min(stop, inner.Sub(num_proposals, one))),
        lambda inner: inner.OneHot(
            inner.Gather(padded, stop), inner.size("logits", 1), inner.constant([0.0, 1.0], np.float32)
        ),
        rank=2,
    )
    residual = body.Max(body.Sub(p, proposal), no_weight)
    has_residual = body.Greater(body.largest(residual), no_weight)
    is_rejected = body.Unsqueeze(body.Less(stop, ends), columns)
    weight = body.Where(body.And(is_rejected, has_residual), residual, p)
    drawn = _draw(body, weight, body.Gather(body.Gather("uniform", one, axis=1), row))
    token = body.Where(is_greedy, body.Gather(best, row), drawn)
    results = [("accepted", body.to(accepted, TensorProto.INT32)), ("next_token", body.to(token, TensorProto.INT32))]
    return body.function("SpeculativeVerify", OPERATOR.tensors, results)


NODES = (OnnxNode(name="SpeculativeVerify", inputs=OPERATOR.tensors, outputs=("accepted", "next_token"), body=_body),)
