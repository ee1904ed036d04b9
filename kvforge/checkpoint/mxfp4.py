"""MXFP4: numbers of 4 bits in blocks of 32 that share a power of two (OCP Microscaling Formats 1.0, section 5.2)."""

import torch
from torch import Tensor

QUANT_METHOD = "mxfp4"
BLOCK = 32

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor([*_POSITIVE, *(-value for value in _POSITIVE)])
_PAIRS = torch.stack((_VALUES.repeat(16), _VALUES.repeat_interleave(16)), dim=-1)
"""The two numbers of each byte."""

_BIAS = 127


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers ``[..., 32 * b]`` bfloat16 of ``blocks`` ``[..., b, 16]`` uint8, two in a byte and the first
    in its low half, times 2^(scale - 127) of ``scales`` ``[..., b]`` uint8. Nothing is rounded but what is below
    bfloat16's normal numbers."""
    values, exponents = _PAIRS[blocks.int()].flatten(-2), scales.int() - _BIAS
    return torch.ldexp(values, exponents[..., None]).bfloat16().flatten(-2)
