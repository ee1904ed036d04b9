"""The definition of LatentKvWrite in plain torch."""

import torch
from torch import Tensor

from plugins.kv_quantization import LARGEST, dynamic_scale, quantize
from plugins.rope_paged_kv_write.reference import at_positions


def reference(
    k: Tensor, cos: Tensor, sin: Tensor, slot_mapping: Tensor, k_pool: Tensor, k_scales: Tensor | None = None
) -> None:
    """Writes T rows of latent attention (DeepSeek-V2) into the pool, in place; each is a token's K and its V.

    k: [T, 1, width], any float dtype, strided views allowed. Of a row the last `rope_dim` numbers rotate, element i of
    them with i + rope_dim/2, by cos and sin [T, rope_dim/2] float32, computed in float32; what stands before stays.
    slot_mapping: [T] int32, page * page_size + offset, negative = the token is not written. k_pool: [pages, page_size,
    1, width] bfloat16 or float32; or, with k_scales [pages, page_size, 1] float32, float8_e4m3fn or int8, whose rows
    get the scale max|x| / (448 for e4m3, 127 for int8), written beside them.
    Raises RuntimeError on a wrong shape or dtype and on a slot outside the pool, before any write.
    """
    passed = k.shape[-1] - 2 * cos.shape[-1]
    rows = torch.cat((k[..., :passed].float(), at_positions(k[..., passed:], cos, sin)), dim=-1)
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot < 0:
            continue
        page, offset = divmod(slot, k_pool.shape[1])
        if k_pool.dtype not in LARGEST or k_scales is None:
            k_pool[page, offset] = rows[token].to(k_pool.dtype)
        else:
            scale = dynamic_scale(rows[token], k_pool.dtype)
            k_scales[page, offset] = scale
            k_pool[page, offset] = quantize(rows[token], scale[:, None], k_pool.dtype)
