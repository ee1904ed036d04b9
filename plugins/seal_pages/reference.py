"""The definition of SealPages in plain torch, and what sealed pages stand for."""

import torch
from torch import Tensor

GROUP = 32
"""Numbers that share a least number and a step."""
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
    """Quantizes pages of K and V to 2 bits, in place.

    exact_k, exact_v: [exact pages, page_size, kv_heads, head_dim] float32 or bfloat16, page_size and head_dim multiples
    of 32, K rotated. seal: [P, 2] int32, an exact page and the page that it becomes; rows that begin with a negative
    number are skipped. k_codes, v_codes: [pages, page_size, kv_heads, head_dim/4] uint8, the first of four channels in
    the lowest bits. k_groups: [pages, page_size/32, kv_heads, head_dim, 2] float16: the least number and the step of
    each channel and 32 tokens; v_groups: [pages, page_size, kv_heads, head_dim/32, 2] float16, of each token and 32
    channels.
    A step is a third of the range, at least 2^-14; a code is round((x - least) / step), half to even, within 0..3, with
    both as float16 has them. Raises RuntimeError on a wrong shape or dtype and on a page outside the pools, before any
    write.
    """
    for exact, page in seal.tolist():
        if exact < 0:
            continue
        k, v = exact_k[exact].float(), exact_v[exact].float()
        codes, k_groups[page] = _quantize(k.unflatten(0, (-1, GROUP)), 1)
        k_codes[page] = _packed(codes.flatten(0, 1))
        codes, v_groups[page] = _quantize(v.unflatten(-1, (-1, GROUP)), -1)
        v_codes[page] = _packed(codes.flatten(-2))


def sealed_values(codes: Tensor, groups: Tensor, by_token: bool) -> Tensor:
    """Return the float32 numbers [..., page_size, kv_heads, head_dim] that pages of V (`by_token`) or K stand for."""
    numbers = torch.stack([codes >> shift & 3 for shift in (0, 2, 4, 6)], -1).flatten(-2).float()
    low, step = groups.float().unbind(-1)
    dim = -1 if by_token else -3
    return numbers * step.repeat_interleave(GROUP, dim) + low.repeat_interleave(GROUP, dim)


def _quantize(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    low, step = low.half().float(), ((high - low) / 3).half().float().clamp(min=LEAST_STEP)
    codes = ((x - low) / step).round().clamp(0, 3).to(torch.uint8)
    return codes, torch.stack((low, step), -1).squeeze(dim - 1 if dim < 0 else dim).half()


def _packed(codes: Tensor) -> Tensor:
    first, second, third, fourth = codes.unflatten(-1, (-1, 4)).unbind(-1)
    return first | second << 2 | third << 4 | fourth << 6
