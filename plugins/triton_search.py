"""How a program finds its sequence among packed ones, without the host knowing their lengths."""

from typing import Any

import triton
import triton.language as tl


@triton.jit
def find_sequence(starts, num_sequences, tile, TILE: tl.constexpr):
    """The last sequence s with starts[s] // TILE + s <= tile: the one whose tile of TILE items `tile` is.

    starts: [num_sequences + 1] int32. Sequence s owns the tiles from starts[s] // TILE + s up to that of s + 1, at
    least as many as it needs; a tile past its items is empty.
    """
    low = tile * 0
    high = low + num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(starts + middle) // TILE + middle <= tile:
            low = middle
        else:
            high = middle
    return low


def num_tiles(items: Any, sequences: Any, tile: int) -> Any:
    """The number of tiles of `items` packed items, sizes may be symbolic."""
    return items // tile + sequences
