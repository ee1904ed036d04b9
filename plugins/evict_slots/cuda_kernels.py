"""EvictSlots as Triton kernels: which slots move where, and the moves."""

import triton
import triton.language as tl


@triton.jit
def _position(position, table, slot, sealed, shift, head, mask, PAGE_SIZE: tl.constexpr, KV_HEADS: tl.constexpr):
    """Where slots are in their text; `table` is the sequence's row."""
    held = mask & (slot < sealed)
    page = tl.load(table + slot // PAGE_SIZE, held, other=0).to(tl.int64)
    stored = tl.load(position + (page * PAGE_SIZE + slot % PAGE_SIZE) * KV_HEADS + head, held, other=0)
    return tl.where(held, stored, slot + shift)


@triton.jit
def _keys(score, positions, mask):
    """int64 in the order of (score, position), zeros equal, a score that is not a number like -inf; what is masked is
    below all others."""
    number = tl.where(score == score, score, float("-inf"))
    bits = number.to(tl.int32, bitcast=True)
    bits = tl.where(bits == -(2**31), 0, bits)
    high = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32
    return tl.where(mask, high + (positions.to(tl.int64) + 2147483648), -(2**63))


@triton.jit
def evict_slots_choose_kernel(
    score,
    keep,
    kv_length,
    sealed,
    shift,
    state_table,
    position,
    num_sequences,
    total,
    state_width,
    position_out,
    holes,
    movers,
    num_moves,
    PAGE_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if position is None:  # a graph of torch gives what is updated in place as the output alone
        position = position_out
    s = tl.program_id(0)
    head = tl.program_id(1)
    row = s.to(tl.int64) * KV_HEADS + head
    table = state_table + s.to(tl.int64) * state_width
    length = tl.load(kv_length + s)
    active = length > 0
    if active:
        active = tl.load(table) >= 0
    length = tl.where(active, length, 0)
    kept = tl.where(active, tl.load(keep + s), 0)
    seal = tl.load(sealed + s)
    moved_by = tl.load(shift + s)
    score += row * total
    holes += row * total
    movers += row * total
    lane = tl.arange(0, BLOCK)

    # The largest bound that `kept` keys reach, four bits at a time.
    digit = tl.arange(0, 16).to(tl.int64)
    bound = tl.full([], -(2**63), tl.int64)
    searched = tl.where(kept < length, length, 0)
    for step in tl.range(0, 16):
        unit = tl.full([], 1, tl.int64) << (60 - 4 * step)
        reached = tl.zeros([16], tl.int32)
        for first in tl.range(0, searched, BLOCK):
            slot = first + lane
            mask = slot < length
            at = _position(position, table, slot, seal, moved_by, head, mask, PAGE_SIZE, KV_HEADS)
            key = _keys(tl.load(score + slot, mask, other=0.0), at, mask)
            over = (key[None, :] >= (bound + digit * unit)[:, None]) & mask[None, :]
            reached += tl.sum(over.to(tl.int32), axis=1)
        bound += unit * tl.maximum(tl.sum((reached >= kept).to(tl.int64), axis=0) - 1, 0)
    bound = tl.where(kept < length, bound, -(2**63))

    num_holes = length * 0
    num_moved = length * 0
    for first in tl.range(0, length, BLOCK):
        slot = first + lane
        mask = slot < length
        at = _position(position, table, slot, seal, moved_by, head, mask, PAGE_SIZE, KV_HEADS)
        key = _keys(tl.load(score + slot, mask, other=0.0), at, mask)
        stays = (key >= bound) & (kept > 0)
        hole = mask & (stays == 0) & (slot < kept)
        mover = mask & stays & (slot >= kept)
        tl.store(holes + num_holes + tl.cumsum(hole.to(tl.int32), axis=0) - 1, slot, hole)
        tl.store(movers + num_moved + tl.cumsum(mover.to(tl.int32), axis=0) - 1, slot, mover)
        num_holes += tl.sum(hole.to(tl.int32), axis=0)
        num_moved += tl.sum(mover.to(tl.int32), axis=0)
        new = mask & (slot < kept) & (slot >= seal)
        page = tl.load(table + slot // PAGE_SIZE, new, other=0).to(tl.int64)
        tl.store(position + (page * PAGE_SIZE + slot % PAGE_SIZE) * KV_HEADS + head, at, new)
    tl.store(num_moves + row, num_holes)


@triton.jit
def _move(rows, at, to, mask):
    tl.store(rows + to, tl.load(rows + at, mask), mask)


@triton.jit
def evict_slots_move_kernel(
    holes,
    movers,
    num_moves,
    sealed,
    shift,
    page_table,
    state_table,
    position,
    k_pool,
    v_pool,
    k_scales,
    v_scales,
    mass,
    squares,
    num_sequences,
    total,
    page_width,
    state_width,
    position_out,
    k_pool_out,
    v_pool_out,
    k_scales_out,
    v_scales_out,
    mass_out,
    squares_out,
    PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    SCALES_PAGE_STRIDE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    if position is None:
        position = position_out
        k_pool = k_pool_out
        v_pool = v_pool_out
    if k_scales is None:
        k_scales = k_scales_out
        v_scales = v_scales_out
    if mass is None:
        mass = mass_out
    if squares is None:
        squares = squares_out
    head = tl.program_id(1)
    s = tl.program_id(2)
    row = s.to(tl.int64) * KV_HEADS + head
    count = tl.load(num_moves + row)
    begin = tl.program_id(0) * TILE
    if begin >= count:
        return
    index = begin + tl.arange(0, TILE)
    mask = index < count
    to = tl.load(holes + row * total + index, mask, other=0)
    at = tl.load(movers + row * total + index, mask, other=0)
    table = page_table + s.to(tl.int64) * page_width
    to_page = tl.load(table + to // PAGE_SIZE, mask, other=0).to(tl.int64)
    at_page = tl.load(table + at // PAGE_SIZE, mask, other=0).to(tl.int64)
    to_row = (to % PAGE_SIZE) * KV_HEADS + head
    at_row = (at % PAGE_SIZE) * KV_HEADS + head
    column = tl.arange(0, DIM_BLOCK)[None, :]
    to_element = (to_page * PAGE_STRIDE + to_row * HEAD_DIM)[:, None] + column
    at_element = (at_page * PAGE_STRIDE + at_row * HEAD_DIM)[:, None] + column
    inside = mask[:, None] & (column < HEAD_DIM)
    _move(k_pool, at_element, to_element, inside)
    _move(v_pool, at_element, to_element, inside)
    if k_scales is not None:
        _move(k_scales, at_page * SCALES_PAGE_STRIDE + at_row, to_page * SCALES_PAGE_STRIDE + to_row, mask)
        _move(v_scales, at_page * SCALES_PAGE_STRIDE + at_row, to_page * SCALES_PAGE_STRIDE + to_row, mask)
    table = state_table + s.to(tl.int64) * state_width
    moved = _position(position, table, at, tl.load(sealed + s), tl.load(shift + s), head, mask, PAGE_SIZE, KV_HEADS)
    to_state = tl.load(table + to // PAGE_SIZE, mask, other=0).to(tl.int64) * (PAGE_SIZE * KV_HEADS) + to_row
    at_state = tl.load(table + at // PAGE_SIZE, mask, other=0).to(tl.int64) * (PAGE_SIZE * KV_HEADS) + at_row
    tl.store(position + to_state, moved, mask)
    if mass is not None:
        _move(mass, at_state, to_state, mask)
    if squares is not None:
        _move(squares, at_state, to_state, mask)
