"""How a program finds its sequence among packed ones, without the host knowing their lengths."""

from typing import Any

import triton
import triton.language as tl

_SEQUENCES = tl.constexpr(256)  # looked at together: one round trip to memory, where a binary search has eight


@triton.jit
def find_sequence(starts, num_sequences, tile, TILE: tl.constexpr):
    """The last sequence s with starts[s] // TILE + s <= tile: the one whose tile of TILE items `tile` is.

    starts: [num_sequences + 1] int32. Sequence s owns the tiles from starts[s] // TILE + s up to that of s + 1, at
    least as many as it needs; a tile past its items is empty.
    """
    lane = tl.arange(0, _SEQUENCES)
    count = tile * 0
    for first in tl.range(0, num_sequences, _SEQUENCES):
        s = first + lane
        begins = tl.load(starts + s, s < num_sequences, other=0) // TILE + s
        count += tl.sum(((begins <= tile) & (s < num_sequences)).to(tl.int32), axis=0)
    return count - 1


def num_tiles(items: Any, sequences: Any, tile: int) -> Any:
    """The number of tiles of `items` packed items, sizes may be symbolic."""
    return items // tile + sequences
