"""Choosing at each decode step which chunks of a long prompt attention sees (ShadowKV, arXiv 2410.21465, section 4.2).

A sequence whose prompt is factored has a short cache in the paged pool: places for the chunks that are chosen, then
exact tokens. Each layer chooses for itself, brings what is missing into the places and attends to the whole of it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

import plugins
from model_defs.rope import RopeConfig, rope_cos_sin


@dataclass(frozen=True)
class ChunkSelection:
    """Chunks of ``chunk_size`` tokens, of which a KV head sees at most ``max_selected``."""

    chunk_size: int
    max_selected: int


@dataclass(frozen=True)
class StepChunks:
    """What the selection needs to know of the step's S sequences, besides the pools.

    ``slot``, ``num_chunks`` and ``num_selected`` ``[S]`` and ``table`` ``[S, Ms]`` are int32: a sequence's row in
    ``sv`` and ``cached`` (-1 for none), its chunks (0: it is not factored, nothing is done for it), how many are to be
    chosen, and its pages in ``u``, ``landmarks``, ``is_outlier`` and ``host_v``. ``rope_cos`` and ``rope_sin``
    ``[positions, head_dim/2]`` fp32 are those of every position.
    """

    selection: ChunkSelection
    slot: Tensor
    table: Tensor
    num_chunks: Tensor
    num_selected: Tensor
    rope_cos: Tensor
    rope_sin: Tensor


def rope_tables(rope: RopeConfig, head_dim: int, num_positions: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin of positions 0, 1, …, each ``[num_positions, head_dim / 2]`` fp32."""
    return rope_cos_sin(torch.arange(num_positions), rope.inverse_frequencies(head_dim))


def bring_in_chunks(
    q: Tensor, pool: tuple[Tensor, ...], query_start: Tensor, page_table: Tensor, chunks: StepChunks, scale: float
) -> None:
    """Choose chunks for the last of each sequence's queries ``q`` ``[T, heads, d]``, rotated, and write those that are
    not in their places yet into the K and V pool. A sequence without queries chooses nothing and keeps what it has.

    ``pool`` is (k_pool, v_pool, u, landmarks, is_outlier, sv, cached, counts, host_v), of which the first two,
    ``cached`` and ``counts`` are written.
    """
    k_pool, v_pool, u, landmarks, is_outlier, sv, cached, counts, host_v = pool
    selected = plugins.landmark_select(
        q,
        landmarks,
        is_outlier,
        query_start,
        chunks.table,
        chunks.num_chunks,
        chunks.num_selected,
        scale,
        chunks.selection.max_selected,
    )
    missed, places = plugins.chunk_cache_update(selected, cached, counts, chunks.slot)
    plugins.selected_kv_write(
        u,
        sv,
        host_v,
        chunks.slot,
        missed,
        places,
        chunks.table,
        page_table,
        chunks.rope_cos,
        chunks.rope_sin,
        chunks.selection.chunk_size,
        k_pool,
        v_pool,
    )
