"""The definition of RopePagedKvWrite in plain torch."""

import torch
from torch import Tensor

from plugins.kv_quantization import INT4, LARGEST, dynamic_scale, quantize
from plugins.kv_rotation import rotate_blocks


def reference(
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    slot_mapping: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    rotates_keys: bool = False,
) -> None:
    """Same arguments as `plugins.rope_paged_kv_write`; writes the pools in place."""
    k = at_positions(k, cos, sin)
    _write(rotate_blocks(k) if rotates_keys else k, slot_mapping, k_pool, k_scales, k_scale)
    _write(v, slot_mapping, v_pool, v_scales, v_scale)


def at_positions(k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return `k` `[T, kv_heads, head_dim]` rotated by `cos` and `sin` `[T, head_dim/2]`: float32."""
    half = k.shape[-1] // 2
    first, second = k[..., :half].float(), k[..., half:].float()
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _write(x: Tensor, slot_mapping: Tensor, pool: Tensor, scales: Tensor | None, scale: float) -> None:
    page_size = pool.shape[1]
    x = rotate_blocks(x) if pool.dtype == INT4 else x
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot < 0:
            continue
        page, offset = divmod(slot, page_size)
        if pool.dtype not in LARGEST:
            pool[page, offset] = x[token].to(pool.dtype)
        elif scales is None:
            pool[page, offset] = quantize(x[token], scale, pool.dtype)
        else:
            row_scale = dynamic_scale(x[token], pool.dtype)
            scales[page, offset] = row_scale
            pool[page, offset] = quantize(x[token], row_scale[:, None], pool.dtype)
