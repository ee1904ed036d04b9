"""Memory of the K,V cache."""

from functools import partial

import torch
from torch import Tensor

from kvforge.dtypes import KV_DTYPES
from kvforge.engine import Manifest
from kvforge.kv_policies import ShadowKV
from kvforge.runtime.huge_pages import allocate_together, place_together
from kvforge.runtime.mapped_memory import mapped_host_memory

Pool = tuple[Tensor, ...]
"""The cache of one owner: K and V elements, then, for dynamic 8-bit formats, K's and V's scales, or, with ShadowKV, u,
landmarks, is_outlier, sv, cached, counts and host_v (see ``shadow_specs``)."""

Pools = list[Pool]

CACHED, COUNTS = 6, 7
"""The places in an owner's pool, with ShadowKV, of the chunks that are there and of the counts of selected ones."""

Spec = tuple[tuple[int, ...], torch.dtype]


def pool_specs(manifest: Manifest, num_pages: int) -> list[Spec]:
    """Return shape and dtype of each tensor of one owner's pool: K and V elements ``[num_pages, page_size, kv_heads,
    head_dim]``, then, for dynamic formats, their float32 scales ``[num_pages, page_size, kv_heads]``."""
    slots = (num_pages, manifest.page_size, manifest.num_kv_heads)
    elements = ((*slots, manifest.head_dim), KV_DTYPES[manifest.kv_dtype])
    scales = (slots, torch.float32)
    return [elements] * 2 + [scales] * (2 if manifest.kv_format.scales == "dynamic" else 0)


def shadow_specs(manifest: Manifest, policy: ShadowKV, shadow_pages: int, num_slots: int) -> list[Spec]:
    """Return shape and dtype of what one owner keeps of factored prompts beside K and V: u ``[shadow_pages, page_size,
    rank]``, landmarks ``[shadow_pages, page_size / chunk_size, kv_heads, head_dim]``, is_outlier uint8
    ``[shadow_pages, page_size / chunk_size, kv_heads]``, sv ``[num_slots, kv_heads, rank, head_dim]``, cached int32
    ``[num_slots, kv_heads, max_selected]``, counts int64 ``[num_slots, kv_heads, 2]`` (chunks selected so far, and
    those that were in place) and, in the host's memory, host_v ``[shadow_pages, page_size, kv_heads, head_dim]``;
    elements in K's dtype."""
    dtype, heads, dim = KV_DTYPES[manifest.kv_dtype], manifest.num_kv_heads, manifest.head_dim
    chunks = (shadow_pages, manifest.page_size // policy.chunk_size, heads)
    return [
        ((shadow_pages, manifest.page_size, policy.rank), dtype),
        ((*chunks, dim), dtype),
        (chunks, torch.uint8),
        ((num_slots, heads, policy.rank, dim), dtype),
        ((num_slots, heads, policy.max_selected), torch.int32),
        ((num_slots, heads, 2), torch.int64),
        ((shadow_pages, manifest.page_size, heads, dim), dtype),
    ]


def allocate_pools(
    manifest: Manifest,
    num_pages: int,
    device: str | torch.device = "cpu",
    shadow_pages: int = 0,
    num_slots: int | None = None,
) -> Pools:
    """Return the pools of every owner, zeroed, as views of one allocation: ``num_pages * manifest.page_bytes`` bytes,
    and what ``allocate_together`` adds for alignment.

    With ShadowKV also ``shadow_specs`` for ``num_slots`` sequences (default: the engine's), cached empty (-1), in the
    same allocation but for every owner's host_v, which share one in the host's memory; where ``device`` is a GPU, this
    is mapped for it.
    """
    policy, specs, host_specs = manifest.policy, pool_specs(manifest, num_pages), []
    if isinstance(policy, ShadowKV):
        num_slots = manifest.max_num_seqs if num_slots is None else num_slots
        *more, host_spec = shadow_specs(manifest, policy, shadow_pages, num_slots)
        specs, host_specs = specs + more, [host_spec]
    views = allocate_together(specs * manifest.num_owners, device)
    width = len(specs)
    pools = [tuple(views[start : start + width]) for start in range(0, len(views), width)]
    if host_specs:
        for pool in pools:
            pool[CACHED].fill_(-1)
        host = place_together(host_specs * manifest.num_owners, partial(mapped_host_memory, device=device))
        pools = [(*pool, host_v) for pool, host_v in zip(pools, host, strict=True)]
    return pools


def device_bytes(pools: Pools) -> int:
    """Return the bytes of the pools' tensors where attention runs."""
    return sum(tensor.nbytes for pool in pools for tensor in pool) - host_bytes(pools)


def host_bytes(pools: Pools) -> int:
    """Return the bytes of the pools' tensors in the host's memory."""
    return sum(pool[-1].nbytes for pool in pools if len(pool) == 9)
