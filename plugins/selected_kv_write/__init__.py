"""SelectedKvWrite: keys rebuilt from factors and values from host memory go to their places in the pools (ShadowKV)."""

from pathlib import Path

import torch
from torch import Tensor

from plugins.operator import Operator
from plugins.registration import define
from plugins.selected_kv_write.reference import reference

SCHEMA = (
    "(Tensor u, Tensor sv, Tensor host_v, Tensor slot, Tensor chunks, Tensor places, Tensor shadow_table, "
    "Tensor page_table, Tensor cos, Tensor sin, int chunk_size, Tensor(a!) k_pool, Tensor(b!) v_pool) -> ()"
)

OPERATOR = Operator(
    name="selected_kv_write",
    schema=SCHEMA,
    reference=reference,
    version=2,
    faces=("reference", "cpu", "triton"),
    sources=tuple(sorted(Path(__file__).parent.glob("*.cpp"))),
)


def _fake(u, sv, host_v, slot, chunks, places, shadow_table, page_table, cos, sin, chunk_size, k_pool, v_pool) -> None:
    return None


define(OPERATOR.name, SCHEMA, _fake)


def selected_kv_write(
    u: Tensor,
    sv: Tensor,
    host_v: Tensor,
    slot: Tensor,
    chunks: Tensor,
    places: Tensor,
    shadow_table: Tensor,
    page_table: Tensor,
    cos: Tensor,
    sin: Tensor,
    chunk_size: int,
    k_pool: Tensor,
    v_pool: Tensor,
) -> tuple[Tensor, Tensor]:
    """Brings chunks of S sequences into the pools, in place, and returns the pools (ShadowKV, arXiv 2410.21465, section
    4.2): of each token its key RoPE(U[row] SV), as `low_rank_key_reconstruct` computes it, and its value host_v[row].

    u: [shadow_pages, page_size, rank] and sv: [slots, kv_heads, rank, head_dim], the factors. host_v:
    [shadow_pages, page_size, kv_heads, head_dim], for CUDA also in pinned host memory. slot: [S] int32, each
    sequence's row of sv, negative = a sequence for which nothing is done. chunks, places: [S, kv_heads, n] int32, as
    `chunk_cache_update` gives them: the first negative chunk ends a list. shadow_table: [S, Ms] int32, the pages of
    the chunks; page_table: [S, M] int32, those of the places. cos, sin: [num_positions, head_dim/2] float32.
    k_pool, v_pool: [pages, page_size, kv_heads, head_dim]. u, sv, host_v and pools are of one dtype, float32 or
    bfloat16, and page_size is a multiple of chunk_size. Places of a head, and pages of a table, are distinct.

    Token i of chunk m is at position p = m * chunk_size + i, its row is shadow_table[s, p // page_size] * page_size +
    p % page_size, and it goes to the slot of the pools that page_table says likewise for place * chunk_size + i.
    Raises RuntimeError on a wrong shape or dtype, and on a slot, a chunk, a place or a page outside its range, before
    any write.
    """
    torch.ops.kvforge.selected_kv_write(
        u, sv, host_v, slot, chunks, places, shadow_table, page_table, cos, sin, chunk_size, k_pool, v_pool
    )
    return k_pool, v_pool
