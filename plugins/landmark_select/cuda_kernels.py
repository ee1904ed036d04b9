"""The two Triton kernels of LandmarkSelect: the logits of tiles of chunks, and the choice of each KV head."""

import triton
import triton.language as tl

_LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def landmark_select_scores_kernel(
    q,
    landmarks,
    is_outlier,
    query_start,
    table,
    num_chunks,
    width,
    num_sequences,
    scores,
    SCALE: tl.constexpr,
    CHUNKS_PER_PAGE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    s = tl.program_id(1)
    head = tl.program_id(2)
    chunk = tl.program_id(0) * TILE + tl.arange(0, TILE)
    begin = tl.load(query_start + s)
    end = tl.load(query_start + s + 1)
    present = (chunk < tl.load(num_chunks + s)) & (begin < end)
    page = tl.load(table + s * width + chunk // CHUNKS_PER_PAGE, present, other=0).to(tl.int64)
    row = (page * CHUNKS_PER_PAGE + chunk % CHUNKS_PER_PAGE) * KV_HEADS + head
    candidate = present & (tl.load(is_outlier + row, present, other=1) == 0)
    column = tl.arange(0, DIM_BLOCK)
    member = tl.arange(0, GROUP_BLOCK)
    inside = column < HEAD_DIM
    keys = tl.load(
        landmarks + row[:, None] * HEAD_DIM + column[None, :], candidate[:, None] & inside[None, :], other=0.0
    )
    query_head = ((end - 1).to(tl.int64) * KV_HEADS + head) * GROUP + member
    asked = (member < GROUP) & (begin < end)
    query = tl.load(q + query_head[None, :] * HEAD_DIM + column[:, None], inside[:, None] & asked[None, :], other=0.0)
    logits = tl.dot(keys, query, input_precision="ieee") * SCALE
    # -inf is left to the chunks that cannot be selected.
    logits = tl.where(logits == float("-inf"), _LOWEST, logits)
    logits = tl.where(candidate[:, None], logits, float("-inf"))
    total = width * CHUNKS_PER_PAGE
    target = ((s * KV_HEADS + head) * GROUP + member).to(tl.int64)[None, :] * total + chunk[:, None]
    tl.store(scores + target, logits, (chunk < total)[:, None] & (member < GROUP)[None, :])


@triton.jit
def _ordered(scores, lse, member, chunk, mask, total, GROUP: tl.constexpr):
    """Integers in the order of the chunks' scores; the smallest of all where a chunk cannot be selected."""
    logits = tl.load(scores + member[:, None] * total + chunk[None, :], mask, other=float("-inf"))
    score = logits - lse[:, None]
    score = tl.where((score == score) & (member < GROUP)[:, None], score, _LOWEST)
    bits = tl.max(tl.maximum(score, _LOWEST), axis=0).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    excluded = tl.min(tl.where((logits == float("-inf")) & (member < GROUP)[:, None], 0, 1), axis=0) == 0
    return tl.where(excluded, -(2**31), key)


@triton.jit
def landmark_select_choose_kernel(
    scores,
    num_chunks,
    num_selected,
    num_sequences,
    total,
    selected,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    MAX_SELECTED: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    SELECTED_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    s = tl.program_id(0)
    head = tl.program_id(1)
    count = tl.load(num_chunks + s)
    member = tl.arange(0, GROUP_BLOCK)
    lane = tl.arange(0, BLOCK)
    scores += ((s * KV_HEADS + head) * GROUP).to(tl.int64) * total

    # log sum exp of every query head, and the number of candidates.
    top = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
    sums = tl.zeros([GROUP_BLOCK], tl.float32)
    candidates = count * 0
    for first in tl.range(0, count, BLOCK):
        chunk = first + lane
        mask = (chunk < count)[None, :] & (member < GROUP)[:, None]
        logits = tl.load(scores + member[:, None] * total + chunk[None, :], mask, other=float("-inf"))
        above = tl.maximum(top, tl.max(logits, axis=1))
        shift = tl.where(above == float("-inf"), 0.0, above)
        sums = sums * tl.exp(top - shift) + tl.sum(tl.exp(logits - shift[:, None]), axis=1)
        top = above
        outside = tl.where((logits == float("-inf")) & (member == 0)[:, None], 1, 0)
        candidates += BLOCK - tl.sum(tl.sum(outside, axis=0), axis=0)
    lse = tl.where(top == float("-inf"), 0.0, top) + tl.log(sums)
    wanted = tl.minimum(tl.load(num_selected + s), candidates)

    # The largest bound that `wanted` keys reach, four bits at a time.
    digit = tl.arange(0, 16).to(tl.int64)
    bound = tl.full([], -(2**31), tl.int64)
    for step in tl.range(0, 8):
        unit = tl.full([], 1, tl.int64) << (28 - 4 * step)
        reached = tl.zeros([16], tl.int32)
        for first in tl.range(0, count, BLOCK):
            chunk = first + lane
            mask = (chunk < count)[None, :] & (member < GROUP)[:, None]
            key = _ordered(scores, lse, member, chunk, mask, total, GROUP).to(tl.int64)
            reached += tl.sum((key[None, :] >= (bound + digit * unit)[:, None]).to(tl.int32), axis=1)
        bound += unit * tl.maximum(tl.sum((reached >= wanted).to(tl.int64), axis=0) - 1, 0)

    above_bound = count * 0
    for first in tl.range(0, count, BLOCK):
        chunk = first + lane
        mask = (chunk < count)[None, :] & (member < GROUP)[:, None]
        key = _ordered(scores, lse, member, chunk, mask, total, GROUP).to(tl.int64)
        above_bound += tl.sum((key > bound).to(tl.int32), axis=0)
    selected += ((s * KV_HEADS + head) * MAX_SELECTED).to(tl.int64)
    place = tl.arange(0, SELECTED_BLOCK)
    tl.store(selected + place, place * 0 - 1, (place >= wanted) & (place < MAX_SELECTED))
    equal = count * 0
    written = count * 0
    for first in tl.range(0, count, BLOCK):
        chunk = first + lane
        mask = (chunk < count)[None, :] & (member < GROUP)[:, None]
        key = _ordered(scores, lse, member, chunk, mask, total, GROUP).to(tl.int64)
        is_equal = (key == bound).to(tl.int32)
        rank = equal + tl.cumsum(is_equal, axis=0)
        taken = (key > bound) | ((is_equal == 1) & (rank <= wanted - above_bound))
        taken = taken & (wanted > 0)
        index = written + tl.cumsum(taken.to(tl.int32), axis=0) - 1
        tl.store(selected + index, chunk, taken)
        equal += tl.sum(is_equal, axis=0)
        written += tl.sum(taken.to(tl.int32), axis=0)
