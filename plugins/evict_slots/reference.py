"""The definition of EvictSlots in plain torch."""

import math

from torch import Tensor


def reference(
    score: Tensor,
    keep: Tensor,
    kv_length: Tensor,
    sealed: Tensor,
    shift: Tensor,
    page_table: Tensor,
    state_table: Tensor,
    position: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    mass: Tensor | None = None,
    squares: Tensor | None = None,
) -> None:
    """Keeps the best slots of every lane, a sequence and KV head, and moves them to its first places, in place.

    score: [S, kv_heads, L] float32. keep, kv_length, sealed, shift: [S] int32 with 0 <= keep, sealed <= kv_length <= L.
    page_table: [S, M] and state_table: [S, Ms] int32. position: [state_pages, page_size, kv_heads] int32. k_pool,
    v_pool: [pages, page_size, kv_heads, head_dim] float32, bfloat16, float8_e4m3fn or int8; k_scales, v_scales:
    [pages, page_size, kv_heads] float32, those of 8-bit pools where each token has its own. mass, squares:
    [state_pages, page_size, kv_heads] float32, statistics that move with their slot.

    Slot i of sequence s is row i % page_size of page page_table[s, i // page_size], its position and statistics are
    the same row of state page state_table[s, i // page_size]. Its position is the one stored there if i < sealed[s],
    else i + shift[s]; all positions of a lane differ. Of the first kv_length[s] slots the keep[s] with the largest
    scores stay, of equal scores the one with the larger position; a score that is not a number is -inf. The k-th
    slot from keep[s] on that stays moves, bit for bit, to the k-th of the first keep[s] that does not, both ascending.
    Then the positions of the first keep[s] slots are stored. Rows from keep[s] on are left as they were. Nothing is
    done for a sequence whose kv_length is 0 or whose first state page is negative. The sequences of a call have
    pages and state pages of their own.
    Raises RuntimeError on a wrong shape or dtype, and on a keep, a length or a page outside its range, before any
    write.
    """
    sequences = [
        s for s, length in enumerate(kv_length.tolist()) if length != 0 and state_table[s, :1].ge(0).all().item()
    ]
    for s in sequences:
        _check(s, score, keep, kv_length, sealed)
        _check_pages("page_table", page_table[s], int(kv_length[s]), k_pool)
        _check_pages("state_table", state_table[s], int(kv_length[s]), position)
    pools = [tensor for tensor in (k_pool, v_pool, k_scales, v_scales) if tensor is not None]
    statistics = [tensor for tensor in (mass, squares) if tensor is not None]
    page_size, kv_heads = k_pool.shape[1:3]
    for s in sequences:
        kept, length = int(keep[s]), int(kv_length[s])
        place = [(int(page_table[s, i // page_size]), i % page_size) for i in range(length)]
        state = [(int(state_table[s, i // page_size]), i % page_size) for i in range(length)]
        for head in range(kv_heads):
            values = [-math.inf if math.isnan(x) else x for x in score[s, head, :length].tolist()]
            positions = [int(position[state[i]][head]) if i < sealed[s] else i + int(shift[s]) for i in range(length)]
            worst_first = sorted(range(length), key=lambda i: (values[i], positions[i]))
            evicted = {*worst_first[: length - kept]}
            holes = sorted(i for i in evicted if i < kept)
            moved = [i for i in range(kept, length) if i not in evicted]
            for hole, slot in zip(holes, moved, strict=True):
                for tensor in pools:
                    tensor[place[hole]][head] = tensor[place[slot]][head]
                for tensor in statistics:
                    tensor[state[hole]][head] = tensor[state[slot]][head]
                positions[hole] = positions[slot]
            for i in range(kept):
                position[state[i]][head] = positions[i]


def _check(s: int, score: Tensor, keep: Tensor, kv_length: Tensor, sealed: Tensor) -> None:
    length = int(kv_length[s])
    if not 0 <= length <= score.shape[2]:
        raise RuntimeError(f"evict_slots: kv_length holds {length} but score has {score.shape[2]} slots")
    for name, value in (("keep", int(keep[s])), ("sealed", int(sealed[s]))):
        if not 0 <= value <= length:
            raise RuntimeError(f"evict_slots: {name} holds {value} for a sequence of {length} slots")


def _check_pages(name: str, table: Tensor, length: int, pool: Tensor) -> None:
    pages, page_size = pool.shape[:2]
    if length > len(table) * page_size:
        raise RuntimeError(f"evict_slots: {name} has room for {len(table) * page_size} slots but kv_length is {length}")
    for page in table[: -(-length // page_size)].tolist() if length else ():
        if not 0 <= page < pages:
            raise RuntimeError(f"evict_slots: {name} holds page {page} of {pages}")
