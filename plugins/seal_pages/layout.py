"""How sealed pages lie in memory: tiles of codes, and groups' numbers in the order in which attention reads them."""

import torch
from torch import Tensor

GROUP = 32
"""Numbers that share a least number and a step."""
TILE = 16
"""Lines and columns of a tile."""
PLANES = {2: (2,), 3: (2, 1), 4: (4,)}
"""In how many bits each a tile has codes of so many: the lowest of all codes first."""
BITS = tuple(PLANES)


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
    """Pack `codes` `[..., lines, columns]`, both multiples of 16, into tiles `[..., lines/16, columns/16, 32 bits]`,
    uint8: plane by plane, of which one in 4 bits has first the 8 left columns of all lines, then the 8 right ones."""
    planes, shift = [], 0
    for width in PLANES[bits]:
        planes.append(_packed(codes.to(torch.uint8) >> shift & (1 << width) - 1, width))
        shift += width
    return torch.cat(planes, -1)


def _packed(codes: Tensor, width: int) -> Tensor:
    """A plane: of a line the even columns and the odd ones, of each the first in the lowest bits of the first byte."""
    words, half_bytes = max(1, width // 2), min(2, width)
    split = codes.unflatten(-1, (-1, words, half_bytes, 8 // width, 2)).unflatten(-6, (-1, TILE))
    split = split.movedim(-6, -4).movedim(-1, -3)  # [..., lines/16, columns/16, word, line, half, byte, place]
    packed = split[..., 0]
    for place in range(1, 8 // width):
        packed = packed | split[..., place] << width * place
    return packed.flatten(-4)


def from_tiles(tiles: Tensor) -> Tensor:
    """The codes of `to_tiles`, `[..., lines, columns]` uint8."""
    codes, begin, shift = None, 0, 0
    for width in PLANES[code_bits(tiles)]:
        end = begin + TILE * TILE * width // 8
        plane = _unpacked(tiles[..., begin:end], width) << shift
        codes = plane if codes is None else codes | plane
        begin, shift = end, shift + width
    assert codes is not None
    return codes


def _unpacked(plane: Tensor, width: int) -> Tensor:
    """The inverse of `_packed`."""
    split = plane.unflatten(-1, (max(1, width // 2), TILE, 2, min(2, width)))
    split = torch.stack([split >> shift & (1 << width) - 1 for shift in range(0, 8, width)], -1)
    return split.movedim(-3, -1).movedim(-4, -6).flatten(-5).flatten(-3, -2)


def sealed_values(codes: Tensor, groups: Tensor) -> Tensor:
    """The float32 numbers that tiles and groups stand for, `[..., lines, columns]`: of K the lines are tokens, of V
    channels."""
    least, step = (x.repeat_interleave(GROUP, -2) for x in groups.float().unbind(-2))
    return from_tiles(codes) * step + least
