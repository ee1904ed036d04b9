"""Choosing at each decode step which chunks of a long prompt attention sees (ShadowKV, arXiv 2410.21465, section 4.2).

A sequence whose prompt is factored has a short cache in the paged pool: places for the chunks that are chosen, then
exact tokens. Each layer chooses for itself, brings what is missing into the places and attends to the whole of it.
"""

from dataclasses import dataclass, field

from torch import Tensor

from model_defs.cache_insertion import CacheInsertion, Pages, Pool
from plugins.chunk_cache_update import updated_chunks
from plugins.landmark_select import landmark_select
from plugins.selected_kv_write import selected_kv_write


@dataclass(frozen=True)
class ChunkSelection(CacheInsertion):
    """Chunks of ``chunk_size`` tokens, of which a KV head sees at most ``max_selected``."""

    chunk_size: int
    max_selected: int
    num_pools: int = field(default=7, kw_only=True)
    needs_positions: bool = field(default=True, kw_only=True)

    def begin(self, inputs: tuple[Tensor, ...], tables: tuple[Tensor, ...]) -> "StepChunks":
        return StepChunks(self, *inputs, *tables)


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

    def __call__(self, q: Tensor, pool: Pool, pages: Pages, scale: float, k_scale: float) -> Pool:
        """Choose chunks for the last of each sequence's queries ``q`` ``[T, heads, d]``, rotated, and write those that
        are not in their places yet into the K and V pool. A sequence without queries keeps what it has.

        ``pool`` is (k_pool, v_pool, u, landmarks, is_outlier, sv, cached, counts, host_v), of which the first two,
        ``cached`` and ``counts`` are written.
        """
        query_start, _, page_table = pages
        k_pool, v_pool, u, landmarks, is_outlier, sv, cached, counts, host_v = pool
        selected = landmark_select(
            q,
            landmarks,
            is_outlier,
            query_start,
            self.table,
            self.num_chunks,
            self.num_selected,
            scale,
            self.selection.max_selected,
        )
        missed, places, cached, counts = updated_chunks(selected, cached, counts, self.slot)
        k_pool, v_pool = selected_kv_write(
            u,
            sv,
            host_v,
            self.slot,
            missed,
            places,
            self.table,
            page_table,
            self.rope_cos,
            self.rope_sin,
            self.selection.chunk_size,
            k_pool,
            v_pool,
        )
        return k_pool, v_pool, u, landmarks, is_outlier, sv, cached, counts, host_v
