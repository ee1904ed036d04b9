"""The definition of AttentionMass in plain torch."""

import torch
from torch import Tensor

SUM, SUM_AND_SQUARES, BELOW, LARGEST_WEIGHT = range(4)
"""What `kind` says is kept of the weights that a slot gets."""


def reference(
    q: Tensor,
    k_pool: Tensor,
    query_start: Tensor,
    kv_length: Tensor,
    page_table: Tensor,
    state_table: Tensor,
    skipped: Tensor,
    scored: Tensor,
    scale: float,
    kind: int,
    mass: Tensor,
    squares: Tensor | None = None,
    k_scales: Tensor | None = None,
    k_scale: float = 1.0,
) -> None:
    """Statistics of the attention weights that the slots of S sequences get from the queries of a step, in place.

    q: [T, heads, head_dim] float32 or bfloat16, rotated, heads a multiple of kv_heads. k_pool: [pages, page_size,
    kv_heads, head_dim] bfloat16, float32, float8_e4m3fn or int8, with k_scales and k_scale as in PagedAttention.
    query_start: [S+1] int32 from 0 to T; kv_length: [S] int32, slots after this step, the sequence's own tokens last;
    page_table: [S, M] int32. state_table: [S, Ms] int32: slot i has its statistics at row i % page_size of page
    state_table[s, i // page_size] of mass and squares [state pages, page_size, kv_heads] float32, pages that no other
    sequence has; nothing is written for a sequence whose first entry is negative. skipped: [S] int32, so many of the
    sequence's first queries are not observed; where none is left, nothing is written. scored: [S] int32, the slots
    from there on start at 0, whatever their memory holds.

    The n-th last query sees the slots before kv_length - n + 1. A slot's weight w is the mean, over the query heads of
    its KV head, of softmax(scale * q . k) over the slots that the query sees. Observed queries are added in their
    order, one after the other, in float32. kind 0: mass += w. kind 1: also squares += w * w. kind 2: mass += 1 where
    w < 1 / (number of slots that the query sees). kind 3: mass = max(mass, w). `squares` go with kind 1 alone.
    A sequence's statistics do not depend, in any bit, on the other sequences, on pages, or on the steps that its
    queries come in. Weights are NaN for a query head with a logit that is NaN or +inf, or with none above -inf: they
    make sums, squares and maxima NaN, and are not below anything.
    Raises RuntimeError on a wrong shape or dtype, and on a count or a page outside its range.
    """
    for s in range(len(kv_length)):
        if not observes(query_start, state_table, skipped, s):
            continue
        places = state_places(kv_length, state_table, k_pool.shape[1], s)
        fresh = torch.arange(int(kv_length[s])) >= scored[s]
        kept = mass[places].masked_fill(fresh[:, None], 0.0)
        kept_squares = None if squares is None else squares[places].masked_fill(fresh[:, None], 0.0)
        keys = cached_keys(k_pool, k_scales, k_scale, kv_length, page_table, s)
        for w in weights(q, keys, query_start, skipped, scale, s):
            seen = kept[: len(w)]
            if kind == BELOW:
                seen += w < 1 / torch.tensor(len(w), dtype=torch.float32)
            elif kind == LARGEST_WEIGHT:
                torch.maximum(seen, w, out=seen)
            else:
                seen += w
            if kept_squares is not None:
                kept_squares[: len(w)] += w * w
        mass[places] = kept
        if squares is not None:
            squares[places] = kept_squares


def observes(query_start: Tensor, state_table: Tensor, skipped: Tensor, s: int) -> bool:
    """Whether a query of sequence s is observed."""
    return bool(query_start[s] + skipped[s] < query_start[s + 1]) and int(state_table[s, 0]) >= 0


def state_places(kv_length: Tensor, state_table: Tensor, page_size: int, s: int) -> tuple[Tensor, Tensor]:
    """State page and row of each slot of sequence s."""
    slot = torch.arange(int(kv_length[s]))
    return state_table[s, slot // page_size].long(), slot % page_size


def cached_keys(
    k_pool: Tensor, k_scales: Tensor | None, k_scale: float, kv_length: Tensor, page_table: Tensor, s: int
) -> Tensor:
    """The keys of sequence s, [slots, kv_heads, head_dim] float32."""
    slot = torch.arange(int(kv_length[s]))
    page, row = page_table[s, slot // k_pool.shape[1]].long(), slot % k_pool.shape[1]
    stored = k_pool[page, row].float()
    return stored * k_scale if k_scales is None else stored * k_scales[page, row][..., None]


def weights(q: Tensor, keys: Tensor, query_start: Tensor, skipped: Tensor, scale: float, s: int) -> list[Tensor]:
    """What each observed query of sequence s gives the slots that it sees: [slots, kv_heads] float32."""
    _, kv_heads, head_dim = keys.shape
    end, given = int(query_start[s + 1]), []
    for token in range(int(query_start[s] + skipped[s]), end):
        seen = keys[: len(keys) - end + token + 1]
        logits = torch.einsum("hgd,khd->khg", q[token].float().view(kv_heads, -1, head_dim), seen) * scale
        given.append(logits.softmax(dim=0).mean(dim=-1))
    return given
