"""Whether two results of one operator are the same but for rounding, which differs between CPUs and GPUs."""

import math

import torch
from torch import Tensor


def tolerance(dtype: torch.dtype, terms: int) -> float:
    """The largest error of a sum of `terms` float32 products, stored in `dtype`, relative to the largest element.

    Each of two results, and what it is computed from, is rounded once to `dtype`: two epsilons. Sums in float32 in any
    order, fused or not, differ by a few sqrt(terms) half-epsilons (Higham and Mary, SIAM J. Sci. Comput. 41, 2019); 8
    of them is a chance below 1e-14. Exponentials and roots of some half-epsilons count as 64 terms.
    """
    return 2 * torch.finfo(dtype).eps + 8 * math.sqrt(max(terms, 64)) * 2**-24


def values_differ(got: Tensor, want: Tensor, terms: int) -> str | None:
    """None where all elements agree within `tolerance`, else the error."""
    if not want.numel():
        return None
    error = float((got.float() - want.float()).abs().max() / want.float().abs().max().clamp(min=1e-30))
    return None if error < tolerance(want.dtype, terms) else f"relative error {error} in {want.dtype}"


def bits_differ(got: Tensor, want: Tensor) -> str | None:
    """None where all elements are the same, NaN whatever its bits, else the first that are not."""
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    same = (got.view(bits) == want.view(bits)) | (got.float().isnan() & want.float().isnan())
    return None if same.all() else f"{got[~same][:3].tolist()} instead of {want[~same][:3].tolist()} in {got.dtype}"
