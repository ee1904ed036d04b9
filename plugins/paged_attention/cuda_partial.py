"""Split-KV decode in Triton (Flash-Decoding): one program per sequence, KV head and split of the keys."""

import triton
import triton.language as tl

from plugins.paged_attention.cuda_block import attend_block


@triton.jit
def split_keys(length, WINDOW: tl.constexpr, KEYS: tl.constexpr, NUM_SPLITS: tl.constexpr, MIN_SPLIT: tl.constexpr):
    """First visible key, where the first split begins and how many keys a split has, for the newest query.

    They follow from the sequence's own length: no other sequence of the batch changes a sum.
    """
    first_key = 0
    if WINDOW > 0:
        first_key = tl.maximum(length - WINDOW, 0)
    begin = first_key // KEYS * KEYS
    split = tl.maximum((length - begin + NUM_SPLITS - 1) // NUM_SPLITS, MIN_SPLIT)
    return first_key, begin, (split + KEYS - 1) // KEYS * KEYS


@triton.jit
def paged_attention_partial_kernel(
    q,
    k_pool,
    v_pool,
    query_start,
    kv_length,
    page_table,
    k_scales,
    v_scales,
    num_sequences,
    max_pages,
    partial,
    Q_STRIDE: tl.constexpr,
    QK_SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    SCALES_PAGE_STRIDE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    DOT_TYPE: tl.constexpr,
):
    """Writes sums of unnormalised weighted V [head_dim], the largest score (log2) and the sum of weights per head."""
    s = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    token = tl.load(query_start + s)
    length = tl.load(kv_length + s)
    if tl.load(query_start + s + 1) - token != 1:
        return
    first_key, begin, split_length = split_keys(length, WINDOW, KEYS, NUM_SPLITS, MIN_SPLIT)
    start = begin + split * split_length
    if start >= length:
        return
    stop = tl.minimum(start + split_length, length)

    row = tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + row
    row_mask = (row < GROUP)[:, None] & (columns < HEAD_DIM)[None, :]
    query = q + token.to(tl.int64) * Q_STRIDE + head[:, None] * HEAD_DIM + columns[None, :]
    query = tl.load(query, row_mask, other=0.0).to(DOT_TYPE)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    position = tl.full([ROWS], 0, tl.int32) + (length - 1)
    table = page_table + s.to(tl.int64) * max_pages
    STORED_DIM: tl.constexpr = HEAD_DIM // 2 if k_pool.dtype.element_ty == tl.uint8 else HEAD_DIM
    k_pool += kv_head * STORED_DIM
    v_pool += kv_head * STORED_DIM
    if k_scales is not None:
        k_scales += kv_head
        v_scales += kv_head
    full = start
    if WINDOW == 0:
        full = stop // KEYS * KEYS
        for block in tl.range(start, full, KEYS):
            acc, top, total = attend_block(
                query, acc, top, total, position, k_pool, v_pool, k_scales, v_scales, table, block, first_key, stop,
                QK_SCALE, WINDOW, PAGE_SIZE, PAGE_STRIDE, SCALES_PAGE_STRIDE, KV_HEADS, HEAD_DIM, KEYS, False,
            )  # fmt: skip
    for block in tl.range(full, stop, KEYS):
        acc, top, total = attend_block(
            query, acc, top, total, position, k_pool, v_pool, k_scales, v_scales, table, block, first_key, stop,
            QK_SCALE, WINDOW, PAGE_SIZE, PAGE_STRIDE, SCALES_PAGE_STRIDE, KV_HEADS, HEAD_DIM, KEYS, True,
        )  # fmt: skip
    place = ((s.to(tl.int64) * (KV_HEADS * GROUP) + head) * NUM_SPLITS + split) * (HEAD_DIM + 2)
    tl.store(partial + place[:, None] + columns[None, :], acc, row_mask)
    tl.store(partial + place + HEAD_DIM, top, row < GROUP)
    tl.store(partial + place + HEAD_DIM + 1, total, row < GROUP)
