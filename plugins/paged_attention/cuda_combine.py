"""Attention of prefill chunks in Triton (FlashAttention-2 over pages), and the merge of what split-KV decode left."""

import triton
import triton.language as tl

from plugins.paged_attention.cuda_block import attend_block
from plugins.paged_attention.cuda_partial import split_keys
from plugins.triton_search import find_sequence


@triton.jit
def _merge(
    partial,
    out,
    s,
    token,
    kv_head,
    length,
    V_SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DECODE_KEYS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    SPLITS_BLOCK: tl.constexpr,
):
    """The result of a sequence's one query, its splits added in the order of the keys."""
    _, begin, split_length = split_keys(length, WINDOW, DECODE_KEYS, NUM_SPLITS, MIN_SPLIT)
    row = tl.arange(0, GROUP_BLOCK)
    columns = tl.arange(0, BLOCK_D)
    mask = (row < GROUP)[:, None] & (columns < HEAD_DIM)[None, :]
    head = kv_head * GROUP + row
    place = (s.to(tl.int64) * (KV_HEADS * GROUP) + head) * NUM_SPLITS * (HEAD_DIM + 2)
    acc = tl.zeros([GROUP_BLOCK, BLOCK_D], tl.float32)
    top = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_BLOCK], tl.float32)
    num_splits = (length - begin + split_length - 1) // split_length
    for first in tl.range(0, num_splits, SPLITS_BLOCK):
        split = first + tl.arange(0, SPLITS_BLOCK)
        present = (split < num_splits)[:, None] & (row < GROUP)[None, :]
        source = partial + place[None, :] + split[:, None] * (HEAD_DIM + 2)
        tops = tl.load(source + HEAD_DIM, present, other=float("-inf"))
        totals = tl.load(source + HEAD_DIM + 1, present, other=0.0)
        present = present[:, :, None] & (columns < HEAD_DIM)[None, None, :]
        sums = tl.load(source[:, :, None] + columns[None, None, :], present, other=0.0)
        new_top = tl.maximum(top, tl.max(tops, axis=0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # rows of padding
        shrink = tl.exp2(top - base)
        share = tl.exp2(tops - base[None, :])
        total = total * shrink + tl.sum(share * totals, axis=0)
        acc = acc * shrink[:, None] + tl.sum(share[:, :, None] * sums, axis=0)
        top = new_top
    result = acc / total[:, None] * V_SCALE
    target = out + (token.to(tl.int64) * (KV_HEADS * GROUP) + head[:, None]) * HEAD_DIM + columns[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask)


@triton.jit
def _tile(
    q,
    k_pool,
    v_pool,
    table,
    k_scales,
    v_scales,
    out,
    token,
    first_query,
    queries,
    kv_head,
    length,
    Q_STRIDE: tl.constexpr,
    QK_SCALE: tl.constexpr,
    V_SCALE: tl.constexpr,
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
    DOT_TYPE: tl.constexpr,
):
    """A tile of queries with all heads of one KV head: row r is query r // GROUP, head r % GROUP."""
    TILE: tl.constexpr = ROWS // GROUP
    row = tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_D)
    query = first_query + row // GROUP
    head = kv_head * GROUP + row % GROUP
    present = (row < TILE * GROUP) & (query < queries)
    mask = present[:, None] & (columns < HEAD_DIM)[None, :]
    source = (token + query).to(tl.int64) * Q_STRIDE + head * HEAD_DIM
    rows = tl.load(q + source[:, None] + columns[None, :], mask, other=0.0).to(DOT_TYPE)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    first_position = length - queries + first_query
    position = length - queries + query
    end_key = length - queries + tl.minimum(first_query + TILE, queries)
    STORED_DIM: tl.constexpr = HEAD_DIM // 2 if k_pool.dtype.element_ty == tl.uint8 else HEAD_DIM
    k_pool += kv_head * STORED_DIM
    v_pool += kv_head * STORED_DIM
    if k_scales is not None:
        k_scales += kv_head
        v_scales += kv_head
    first_key = 0
    if WINDOW > 0:
        first_key = tl.maximum(first_position - WINDOW + 1, 0)
    full = first_key // KEYS * KEYS
    if WINDOW == 0:
        full = (first_position + 1) // KEYS * KEYS
        for block in tl.range(0, full, KEYS):
            acc, top, total = attend_block(
                rows, acc, top, total, position, k_pool, v_pool, k_scales, v_scales, table, block, first_key, end_key,
                QK_SCALE, WINDOW, PAGE_SIZE, PAGE_STRIDE, SCALES_PAGE_STRIDE, KV_HEADS, HEAD_DIM, KEYS, False,
            )  # fmt: skip
    for block in tl.range(full, end_key, KEYS):
        acc, top, total = attend_block(
            rows, acc, top, total, position, k_pool, v_pool, k_scales, v_scales, table, block, first_key, end_key,
            QK_SCALE, WINDOW, PAGE_SIZE, PAGE_STRIDE, SCALES_PAGE_STRIDE, KV_HEADS, HEAD_DIM, KEYS, True,
        )  # fmt: skip
    target = ((token + query).to(tl.int64) * (KV_HEADS * GROUP) + head) * HEAD_DIM
    result = acc / total[:, None] * V_SCALE
    tl.store(out + target[:, None] + columns[None, :], result.to(out.dtype.element_ty), mask)


@triton.jit
def paged_attention_combine_kernel(
    q,
    k_pool,
    v_pool,
    query_start,
    kv_length,
    page_table,
    k_scales,
    v_scales,
    partial,
    num_tokens,
    num_sequences,
    max_pages,
    out,
    Q_STRIDE: tl.constexpr,
    QK_SCALE: tl.constexpr,
    V_SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    SCALES_PAGE_STRIDE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DECODE_KEYS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    SPLITS_BLOCK: tl.constexpr,
    DOT_TYPE: tl.constexpr,
):
    """One program per tile of queries and KV head. Without `partial`, sequences of one query are tiles as well."""
    TILE: tl.constexpr = ROWS // GROUP
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # a chunk's last tile has the most keys: it starts first
    kv_head = tl.program_id(1)
    s = find_sequence(query_start, num_sequences, tile, TILE)
    token = tl.load(query_start + s)
    queries = tl.load(query_start + s + 1) - token
    first_query = (tile - token // TILE - s) * TILE
    length = tl.load(kv_length + s)
    if first_query >= queries:
        return
    table = page_table + s.to(tl.int64) * max_pages
    # The test for `partial` is one of the compiler: what is not None there is not compiled without it.
    if partial is not None:
        if queries == 1:
            _merge(
                partial, out, s, token, kv_head, length, V_SCALE, WINDOW, KV_HEADS, GROUP, GROUP_BLOCK, HEAD_DIM,
                BLOCK_D, DECODE_KEYS, NUM_SPLITS, MIN_SPLIT, SPLITS_BLOCK,
            )  # fmt: skip
        else:
            _tile(
                q, k_pool, v_pool, table, k_scales, v_scales, out, token, first_query, queries, kv_head, length,
                Q_STRIDE, QK_SCALE, V_SCALE, WINDOW, PAGE_SIZE, PAGE_STRIDE, SCALES_PAGE_STRIDE, KV_HEADS, GROUP,
                HEAD_DIM, BLOCK_D, ROWS, KEYS, DOT_TYPE,
            )  # fmt: skip
    else:
        _tile(
            q, k_pool, v_pool, table, k_scales, v_scales, out, token, first_query, queries, kv_head, length,
            Q_STRIDE, QK_SCALE, V_SCALE, WINDOW, PAGE_SIZE, PAGE_STRIDE, SCALES_PAGE_STRIDE, KV_HEADS, GROUP, HEAD_DIM,
            BLOCK_D, ROWS, KEYS, DOT_TYPE,
        )  # fmt: skip
