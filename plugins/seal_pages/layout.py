"""How sealed pages lie in memory: tiles of codes, and groups' numbers in the order in which attention reads them."""

import torch
from torch import Tensor

GROUP = 32
"""Numbers that share a least number and a step."""
TILE = 16
"""Lines and columns of a tile of 64 bytes."""


def sealed_shapes(page_size: int, kv_heads: int, head_dim: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape without the number of pages, and dtype, of each tensor of sealed pages, by its name in `seal_pages`: in all
    head_dim * 3/8 bytes for a token's K or V of a head."""
    tokens, channels = (page_size // TILE, page_size // GROUP), (head_dim // TILE, head_dim // GROUP)
    return {
        "k_codes": ((kv_heads, tokens[0], channels[0], TILE * TILE // 4), torch.uint8),
        "v_codes": ((kv_heads, channels[0], tokens[0], TILE * TILE // 4), torch.uint8),
        "k_groups": ((kv_heads, tokens[1], 2, head_dim), torch.float16),
        "v_groups": ((kv_heads, channels[1], 2, page_size), torch.float16),
    }


def to_tiles(codes: Tensor) -> Tensor:
    """Pack `codes` `[..., lines, columns]`, 0 to 3, both multiples of 16: `[..., lines/16, columns/16, 64]` uint8.

    Four bytes of a tile are a line's. They are two 16-bit words, one of the even columns and one of the odd ones, the
    first of each in the lowest two bits.
    """
    split = codes.to(torch.uint8).unflatten(-1, (-1, 2, 4, 2)).unflatten(-5, (-1, TILE))
    split = split.movedim(-5, -4).movedim(-1, -3)  # [..., lines/16, columns/16, line, parity, byte, place]
    first, second, third, fourth = split.unbind(-1)
    return (first | second << 2 | third << 4 | fourth << 6).flatten(-3)


def from_tiles(tiles: Tensor) -> Tensor:
    """The codes of `to_tiles`, `[..., lines, columns]` uint8."""
    split = tiles.unflatten(-1, (TILE, 2, 2))
    split = torch.stack([split >> shift & 3 for shift in (0, 2, 4, 6)], -1)
    return split.movedim(-3, -1).movedim(-5, -4).flatten(-4).flatten(-3, -2)


def sealed_values(codes: Tensor, groups: Tensor) -> Tensor:
    """The float32 numbers that tiles and groups stand for, `[..., lines, columns]`: of K the lines are tokens, of V
    channels."""
    least, step = (x.repeat_interleave(GROUP, -2) for x in groups.float().unbind(-2))
    return from_tiles(codes) * step + least
