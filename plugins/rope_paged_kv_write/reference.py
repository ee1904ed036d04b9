"""The definition of RopePagedKvWrite in plain torch."""

import torch
from torch import Tensor


def reference(
    k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, slot_mapping: Tensor, k_pool: Tensor, v_pool: Tensor
) -> None:
    """Same arguments as `plugins.rope_paged_kv_write`; writes the pools in place."""
    half = k.shape[-1] // 2
    first, second = k[..., :half].float(), k[..., half:].float()
    cos, sin = cos[:, None, :], sin[:, None, :]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    page_size = k_pool.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot < 0:
            continue
        page, offset = divmod(slot, page_size)
        k_pool[page, offset] = rotated[token].to(k_pool.dtype)
        v_pool[page, offset] = v[token].to(v_pool.dtype)
