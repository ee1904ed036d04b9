"""How sealed pages lie in memory: tiles of codes, and groups' numbers in the order in which attention reads them."""

import torch
from torch import Tensor

GROUP = 32
"""Numbers that share a least number and a step."""
TILE = 16
"""Lines and columns of a tile."""
BITS = (2, 4)
"""Of a code."""


def sealed_shapes(
    page_size: int, kv_heads: int, head_dim: int, bits: int
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape without the number of pages, and dtype, of each tensor of sealed pages, by its name in `seal_pages`: in all
    head_dim * (bits + 1) / 8 bytes for a token's K or V of a head."""
    tokens, channels = (page_size // TILE, page_size // GROUP), (head_dim // TILE, head_dim // GROUP)
    tile = TILE * TILE * bits // 8
    return {
        "k_codes": ((kv_heads, tokens[0], channels[0], tile), torch.uint8),
        "v_codes": ((kv_heads, channels[0], tokens[0], tile), torch.uint8),
        "k_groups": ((kv_heads, tokens[1], 2, head_dim), torch.float16),
        "v_groups": ((kv_heads, channels[1], 2, page_size), torch.float16),
    }


def code_bits(tiles: Tensor) -> int:
    """Bits of a code in `tiles` `[..., bytes of a tile]`."""
    return 8 * tiles.shape[-1] // TILE**2


def to_tiles(codes: Tensor, bits: int) -> Tensor:
    """Pack `codes` `[..., lines, columns]`, both multiples of 16, into tiles `[..., lines/16, columns/16, 32 bits]`.

    A line has a 32-bit word for each 32 / bits of its columns; the first words of all lines are before the second ones.
    A word is two 16-bit halves, one of the even columns and one of the odd ones, the first of each in the lowest bits.
    """
    split = codes.to(torch.uint8).unflatten(-1, (-1, bits // 2, 2, 8 // bits, 2)).unflatten(-6, (-1, TILE))
    split = split.movedim(-6, -4).movedim(-1, -3)  # [..., lines/16, columns/16, word, line, half, byte, place]
    packed = split[..., 0]
    for place in range(1, 8 // bits):
        packed = packed | split[..., place] << bits * place
    return packed.flatten(-4)


def from_tiles(tiles: Tensor) -> Tensor:
    """The codes of `to_tiles`, `[..., lines, columns]` uint8."""
    bits = code_bits(tiles)
    split = tiles.unflatten(-1, (bits // 2, TILE, 2, 2))
    split = torch.stack([split >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)], -1)
    return split.movedim(-3, -1).movedim(-4, -6).flatten(-5).flatten(-3, -2)


def sealed_values(codes: Tensor, groups: Tensor) -> Tensor:
    """The float32 numbers that tiles and groups stand for, `[..., lines, columns]`: of K the lines are tokens, of V
    channels."""
    least, step = (x.repeat_interleave(GROUP, -2) for x in groups.float().unbind(-2))
    return from_tiles(codes) * step + least
