"""Reading, writing and thinning out an owner's cache between two steps: what KV policies that evict do with its pools.

A cache is (k_pool, v_pool) or (k_pool, v_pool, k_scales, v_scales), as layers take it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from plugins.evict_slots import evict_slots
from plugins.kv_quantization import LARGEST, dequantize, dynamic_scale, quantize

Cache = tuple[Tensor, ...]


def copy_pages(cache: Cache, old: Tensor, new: Tensor) -> None:
    """Copy pages ``old`` ``[N]`` to ``new`` ``[N]``; none is in both."""
    for pool in cache:
        rows = _indexable(pool)
        rows[new] = rows[old]


def move_tokens(cache: Cache, old: Tensor, new: Tensor) -> None:
    """Move single heads' tokens bit for bit: from ``old`` to ``new``, rows of a pool as ``[pages * page_size *
    kv_heads]`` has them, int64 ``[N]``. All are read before any is written."""
    for pool in cache:
        rows = _indexable(pool).view(-1, *pool.shape[3:])
        if rows.dim() == 2 and rows[:1].nbytes % 8 == 0:  # which torch copies in fewer pieces
            rows = rows.view(torch.int64)
        rows.index_copy_(0, new, rows.index_select(0, old))


def read_keys(cache: Cache, pages: Tensor, places: Tensor, k_scale: float) -> Tensor:
    """Return the rotated keys ``[..., kv_heads, d]`` float32 of the tokens at ``places`` of ``pages``, int64 ``[...]``
    each; ``k_scale`` is the cache's where it has one for all."""
    return _read(cache[0], cache[2] if len(cache) > 2 else None, pages, places, k_scale)


def read_values(cache: Cache, pages: Tensor, places: Tensor, v_scale: float) -> Tensor:
    """Return values; see ``read_keys``."""
    return _read(cache[1], cache[3] if len(cache) > 2 else None, pages, places, v_scale)


def _read(pool: Tensor, scales: Tensor | None, pages: Tensor, places: Tensor, scale: float) -> Tensor:
    stored = _indexable(pool)[pages, places].view(pool.dtype)
    return dequantize(stored, None if scales is None else scales[pages, places], scale)


def write_keys(cache: Cache, pages: Tensor, places: Tensor, keys: Tensor, k_scale: float) -> None:
    """Write what ``read_keys`` returns, in the cache's format; arguments as there."""
    pool, scale = cache[0], torch.tensor(k_scale)
    if len(cache) > 2:
        cache[2][pages, places] = scales = dynamic_scale(keys, pool.dtype)
        scale = scales[..., None]
    stored = quantize(keys, scale, pool.dtype) if pool.dtype in LARGEST else keys.to(pool.dtype)
    _indexable(pool)[pages, places] = _indexable(stored)


def evict(
    cache: Cache, score: Tensor, numbers: Sequence[Tensor], position: Tensor, statistics: Sequence[Tensor]
) -> None:
    """Keep the tokens of the largest scores: ``plugins.evict_slots``. ``numbers`` are keep, kv_length, sealed, shift,
    page_table and state_table; ``statistics`` at most mass and squares."""
    k_scales, v_scales = cache[2:] or (None, None)
    mass, squares = (*statistics, None, None)[:2]
    keep, kv_length, sealed, shift, page_table, state_table = numbers
    evict_slots(
        score, keep, kv_length, sealed, shift, page_table, state_table, position, cache[0], cache[1], k_scales,
        v_scales, mass, squares,
    )  # fmt: skip


def _indexable(pool: Tensor) -> Tensor:
    """Return a pool as torch can index it: not every operation knows 8-bit floats."""
    return pool.view(torch.uint8) if pool.itemsize == 1 else pool
