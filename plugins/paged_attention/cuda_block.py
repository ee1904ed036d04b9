"""One step of attention in Triton: a block of keys of one KV head, read through the page table."""

import triton
import triton.language as tl


@triton.jit
def _load_rows(pool, rows, columns, valid, MASKED: tl.constexpr, HEAD_DIM: tl.constexpr):
    """[keys, head dim] numbers; masked ones are 0, whatever their memory holds."""
    IN_PAIRS: tl.constexpr = pool.dtype.element_ty == tl.uint8
    places = columns // 2 if IN_PAIRS else columns
    pointers = pool + rows[:, None] + places[None, :]
    if MASKED:
        stored = tl.load(pointers, valid[:, None] & (columns < HEAD_DIM)[None, :], other=0.0)
    elif columns.shape[0] != HEAD_DIM:
        stored = tl.load(pointers, (columns < HEAD_DIM)[None, :], other=0.0)
    else:
        stored = tl.load(pointers)
    if IN_PAIRS:  # the even number in the lower half, in two's complement
        code = (stored.to(tl.int32) >> (columns % 2 * 4)[None, :]) & 15
        stored = ((code ^ 8) - 8).to(tl.int8)
    return stored


@triton.jit
def attend_block(
    q,
    acc,
    top,
    total,
    position,
    k_pool,
    v_pool,
    k_scales,
    v_scales,
    table,
    start,
    first_key,
    end_key,
    QK_SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    SCALES_PAGE_STRIDE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Online softmax over the keys start..start+KEYS-1, at least one of which lies in first_key..end_key-1.

    q: [rows, BLOCK_D]; acc [rows, BLOCK_D], top and total [rows]: the state, with `top` the largest score so far in
    units of log2; position [rows]: last key that a row sees. The pools and scales begin at the KV head. Without
    MASKED all keys are visible to all rows. `start` is a multiple of KEYS.
    """
    columns = tl.arange(0, q.shape[1])
    lane = tl.arange(0, KEYS)
    key = start + lane
    valid = (key >= first_key) & (key < end_key)
    if PAGE_SIZE % KEYS == 0:  # the block lies in one page
        page = tl.load(table + start // PAGE_SIZE).to(tl.int64)
        in_page = start % PAGE_SIZE + lane
    elif MASKED:
        page = tl.load(table + key // PAGE_SIZE, valid, other=0).to(tl.int64)
        in_page = key % PAGE_SIZE
    else:
        page = tl.load(table + key // PAGE_SIZE).to(tl.int64)
        in_page = key % PAGE_SIZE
    STORED_DIM: tl.constexpr = HEAD_DIM // 2 if k_pool.dtype.element_ty == tl.uint8 else HEAD_DIM
    rows = page * PAGE_STRIDE + in_page * (KV_HEADS * STORED_DIM)
    places = page * SCALES_PAGE_STRIDE + in_page * KV_HEADS

    k = _load_rows(k_pool, rows, columns, valid, MASKED, HEAD_DIM).to(q.dtype)
    score = tl.dot(q, tl.trans(k), input_precision="ieee") * QK_SCALE
    if k_scales is not None:
        score *= tl.load(k_scales + places, valid, other=0.0)[None, :]
    if MASKED:
        visible = valid[None, :] & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            visible &= key[None, :] > position[:, None] - WINDOW
        score = tl.where(visible, score, float("-inf"))
    new_top = tl.maximum(top, tl.max(score, axis=1))
    # A row that has seen no key yet: any finite number serves, all its weights are 0.
    base = tl.where(new_top == float("-inf"), 0.0, new_top) if MASKED else new_top
    weight = tl.exp2(score - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(weight, axis=1)
    if v_scales is not None:
        weight *= tl.load(v_scales + places, valid, other=0.0)[None, :]
    v = _load_rows(v_pool, rows, columns, valid, MASKED, HEAD_DIM).to(q.dtype)
    acc = tl.dot(weight.to(q.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, new_top, total
