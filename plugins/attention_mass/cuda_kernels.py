"""The two Triton kernels of AttentionMass: each query's maximum and total, and the statistics of blocks of slots."""

import triton
import triton.language as tl

from plugins.triton_search import find_sequence


@triton.jit
def _observed(query_start, state_table, skipped, s, max_state_pages):
    """First and last query of sequence s that are observed, none where the first is the last."""
    end = tl.load(query_start + s + 1)
    first = tl.minimum(tl.load(query_start + s) + tl.load(skipped + s), end)
    return tl.where(tl.load(state_table + s.to(tl.int64) * max_state_pages) < 0, end, first), end


@triton.jit
def _keys(
    k_pool,
    k_scales,
    table,
    slot,
    present,
    QK_SCALE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    SCALES_PAGE_STRIDE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOT_TYPE: tl.constexpr,
):
    """Keys [slots, BLOCK_D] of one KV head, at which the pools begin, and what their products are multiplied by."""
    columns = tl.arange(0, BLOCK_D)
    page = tl.load(table + slot // PAGE_SIZE, present, other=0).to(tl.int64)
    row = slot % PAGE_SIZE
    place = page * PAGE_STRIDE + row * (KV_HEADS * HEAD_DIM)
    keys = tl.load(
        k_pool + place[:, None] + columns[None, :], present[:, None] & (columns < HEAD_DIM)[None, :], other=0.0
    )
    scale = tl.full(slot.shape, QK_SCALE, tl.float32)
    if k_scales is not None:
        scale *= tl.load(k_scales + page * SCALES_PAGE_STRIDE + row * KV_HEADS, present, other=0.0)
    return keys.to(DOT_TYPE), scale


@triton.jit
def attention_mass_totals_kernel(
    q,
    k_pool,
    query_start,
    kv_length,
    page_table,
    state_table,
    skipped,
    k_scales,
    num_tokens,
    num_sequences,
    max_pages,
    max_state_pages,
    totals,
    Q_STRIDE: tl.constexpr,
    QK_SCALE: tl.constexpr,
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
    """The largest logit, in units of log2, and the total relative to it, of a tile of queries with all heads of one KV
    head: row r is query r // GROUP, head r % GROUP. A block of keys that a row does not see changes neither."""
    TILE: tl.constexpr = ROWS // GROUP
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    s = find_sequence(query_start, num_sequences, tile, TILE)
    begin = tl.load(query_start + s)
    first, end = _observed(query_start, state_table, skipped, s, max_state_pages)
    tile_begin = begin + (tile - (begin // TILE + s)) * TILE
    if (tile_begin >= end) | (tile_begin + TILE <= first):
        return
    row = tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_D)
    token = tile_begin + row // GROUP
    head = kv_head * GROUP + row % GROUP
    present = (row < TILE * GROUP) & (token < end)
    source = token.to(tl.int64) * Q_STRIDE + head * HEAD_DIM
    mask = present[:, None] & (columns < HEAD_DIM)[None, :]
    query = tl.load(q + source[:, None] + columns[None, :], mask, other=0.0).to(DOT_TYPE)
    before = tl.load(kv_length + s) - end
    visible = before + token + 1
    stop = before + tl.minimum(tile_begin + TILE, end)
    table = page_table + s.to(tl.int64) * max_pages
    k_pool += kv_head * HEAD_DIM
    if k_scales is not None:
        k_scales += kv_head
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for block in tl.range(0, stop, KEYS):
        slot = block + tl.arange(0, KEYS)
        keys, scale = _keys(
            k_pool, k_scales, table, slot, slot < stop,
            QK_SCALE, PAGE_SIZE, PAGE_STRIDE, SCALES_PAGE_STRIDE, KV_HEADS, HEAD_DIM, BLOCK_D, DOT_TYPE,
        )  # fmt: skip
        logit = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale[None, :]
        logit = tl.where(slot[None, :] < visible[:, None], logit, float("-inf"))
        new_top = tl.maximum(top, tl.max(logit, axis=1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp2(top - base) + tl.sum(tl.exp2(logit - base[:, None]), axis=1)
        top = new_top
    target = totals + (token.to(tl.int64) * (KV_HEADS * GROUP) + head) * 2
    tl.store(target, tl.where(top == float("-inf"), 0.0, top), present)
    tl.store(target + 1, total, present)


@triton.jit
def attention_mass_add_kernel(
    totals,
    q,
    k_pool,
    query_start,
    kv_length,
    page_table,
    state_table,
    skipped,
    scored,
    mass,
    squares,
    k_scales,
    num_sequences,
    max_pages,
    max_state_pages,
    mass_out,
    squares_out,
    Q_STRIDE: tl.constexpr,
    QK_SCALE: tl.constexpr,
    KIND: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    SCALES_PAGE_STRIDE: tl.constexpr,
    STATE_PAGE_STRIDE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    DOT_TYPE: tl.constexpr,
):
    """The statistics of a block of slots of one sequence and KV head: its keys meet one query after the other."""
    # A tensor updated in place is two arguments of one address; a graph of torch gives the output alone.
    if mass is None:
        mass = mass_out
    if squares is None:
        squares = squares_out
    s = tl.program_id(1)
    kv_head = tl.program_id(2)
    length = tl.load(kv_length + s)
    first, end = _observed(query_start, state_table, skipped, s, max_state_pages)
    begin = tl.program_id(0) * KEYS
    if (first >= end) | (begin >= length):
        return
    slot = begin + tl.arange(0, KEYS)
    present = slot < length
    k_pool += kv_head * HEAD_DIM
    if k_scales is not None:
        k_scales += kv_head
    keys, scale = _keys(
        k_pool, k_scales, page_table + s.to(tl.int64) * max_pages, slot, present,
        QK_SCALE, PAGE_SIZE, PAGE_STRIDE, SCALES_PAGE_STRIDE, KV_HEADS, HEAD_DIM, BLOCK_D, DOT_TYPE,
    )  # fmt: skip
    page = tl.load(state_table + s.to(tl.int64) * max_state_pages + slot // PAGE_SIZE, present, other=0).to(tl.int64)
    place = page * STATE_PAGE_STRIDE + slot % PAGE_SIZE * KV_HEADS + kv_head
    known = present & (slot < tl.load(scored + s))
    kept = tl.load(mass + place, known, other=0.0)
    kept_squares = tl.zeros([KEYS], tl.float32)
    if KIND == 1:
        kept_squares = tl.load(squares + place, known, other=0.0)
    member = tl.arange(0, GROUP_BLOCK)
    columns = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + member
    mask = (columns < HEAD_DIM)[:, None] & (member < GROUP)[None, :]
    # The first query that sees one of the slots is the one that sees `begin`.
    first = tl.maximum(first, begin - length + end)
    for step in tl.range(0, end - first):
        token = first + step
        source = token.to(tl.int64) * Q_STRIDE + head * HEAD_DIM
        query = tl.load(q + source[None, :] + columns[:, None], mask, other=0.0).to(DOT_TYPE)
        of_head = totals + (token.to(tl.int64) * (KV_HEADS * GROUP) + head) * 2
        top = tl.load(of_head, member < GROUP, other=0.0)
        total = tl.load(of_head + 1, member < GROUP, other=1.0)
        logit = tl.dot(keys, query, input_precision="ieee") * scale[:, None]
        weight = tl.exp2(logit - top[None, :]) / total[None, :]
        w = tl.sum(tl.where((member < GROUP)[None, :], weight, 0.0), axis=1) / GROUP
        visible = length - end + token + 1
        seen = slot < visible
        if KIND == 2:
            below = w < 1.0 / visible.to(tl.float32)
            kept += tl.where(seen & below, 1.0, 0.0)
        elif KIND == 3:
            kept = tl.where(seen & ((kept < w) | (w != w)), w, kept)
        else:
            kept = tl.where(seen, kept + w, kept)
            if KIND == 1:
                kept_squares = tl.where(seen, kept_squares + w * w, kept_squares)
    tl.store(mass + place, kept, present)
    if KIND == 1:
        tl.store(squares + place, kept_squares, present)
