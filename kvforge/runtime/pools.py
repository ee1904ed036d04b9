"""Memory of the K,V cache."""

import torch
from torch import Tensor

from kvforge.dtypes import KV_DTYPES
from kvforge.engine import Manifest
from kvforge.runtime.huge_pages import allocate_together

Pool = tuple[Tensor, ...]
"""The cache of one owner: K and V elements, then, for dynamic 8-bit formats, K's and V's scales."""

Pools = list[Pool]


def pool_specs(manifest: Manifest, num_pages: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of each tensor of one owner's pool: K and V elements ``[num_pages, page_size, kv_heads,
    head_dim]``, then, for dynamic formats, their float32 scales ``[num_pages, page_size, kv_heads]``."""
    slots = (num_pages, manifest.page_size, manifest.num_kv_heads)
    elements = ((*slots, manifest.head_dim), KV_DTYPES[manifest.kv_dtype])
    scales = (slots, torch.float32)
    return [elements] * 2 + [scales] * (2 if manifest.kv_format.scales == "dynamic" else 0)


def allocate_pools(manifest: Manifest, num_pages: int, device: str | torch.device = "cpu") -> Pools:
    """Return the pools of every owner, zeroed, as views of one allocation: ``num_pages * manifest.page_bytes`` bytes,
    and what ``allocate_together`` adds for alignment."""
    specs = [spec for _ in manifest.owners for spec in pool_specs(manifest, num_pages)]
    views = allocate_together(specs, device)
    width = len(views) // manifest.num_owners
    return [tuple(views[start : start + width]) for start in range(0, len(views), width)]
