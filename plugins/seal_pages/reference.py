"""The definition of SealPages in plain torch."""

import torch
from torch import Tensor

from plugins.seal_pages.layout import GROUP, code_bits, to_tiles

LEAST_STEP = 2.0**-14
"""The smallest normal float16."""


def reference(
    exact_k: Tensor,
    exact_v: Tensor,
    seal: Tensor,
    k_codes: Tensor,
    v_codes: Tensor,
    k_groups: Tensor,
    v_groups: Tensor,
) -> None:
    """Quantizes pages of K and V to 2, 3 or 4 bits, in place (KIVI, arXiv 2402.02750).

    exact_k, exact_v: [exact pages, page_size, kv_heads, head_dim] float32 or bfloat16, page_size and head_dim multiples
    of 32, K rotated. seal: [P, 2] int32, an exact page and the page that it becomes; rows that begin with a negative
    number are skipped, and no two of the others name the same page.
    A head's K of a page is a matrix [page_size, head_dim], its V the matrix [head_dim, page_size]. 32 lines of a column
    are a group: of K 32 tokens of a channel, of V 32 channels of a token. With b bits its step is its range divided by
    2^b - 1, at least 2^-14; a code is round((x - least) / step), half to even, within 0..2^b - 1, with both as float16
    has them. k_codes, v_codes: [pages, kv_heads, lines/16, columns/16, 32 b] uint8, `to_tiles` of these. k_groups,
    v_groups: [pages, kv_heads, lines/32, 2, columns] float16, the least numbers and the steps.
    Where a number of a group is not finite, or is beyond float16's largest, the step or the least number is not finite.
    Raises RuntimeError on a wrong shape or dtype and on a page outside the pools, before any write.
    """
    pairs = [pair for pair in seal.tolist() if pair[0] >= 0]
    for exact, page in pairs:
        for name, index, pool in (("exact page", exact, exact_k), ("page", page, k_codes)):
            if not 0 <= index < len(pool):
                raise RuntimeError(f"seal_pages: seal names {name} {index} of {len(pool)}")
    for exact, page in pairs:
        k_codes[page], k_groups[page] = _quantize(exact_k[exact].transpose(0, 1), code_bits(k_codes))
        v_codes[page], v_groups[page] = _quantize(exact_v[exact].permute(1, 2, 0), code_bits(v_codes))


def _quantize(matrix: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Tiles and groups of [kv_heads, lines, columns]."""
    last = (1 << bits) - 1
    x = matrix.float().unflatten(1, (-1, GROUP))
    least, largest = x.amin(2) + 0.0, x.amax(2)  # of two zeros the positive one
    step = ((largest - least) / last).half().float().clamp(min=LEAST_STEP)
    groups = torch.stack((least, step), 2).half()
    least, step = (numbers[:, :, None] for numbers in groups.float().unbind(2))
    codes = ((x - least) / step).nan_to_num(0.0).round().clamp(0, last)
    return to_tiles(codes.flatten(1, 2), bits), groups
