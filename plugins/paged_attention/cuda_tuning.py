"""Block sizes of the Triton attention kernels."""

from dataclasses import dataclass

import torch
import triton

_SMALL_SHARED = 89  # consumer cards have 99 KiB of shared memory per block, data-centre cards 163 KiB and more


@dataclass(frozen=True)
class Blocks:
    """One program: `rows` of queries times heads, `keys` per step, warps, and Triton's num_stages.

    The loads of keys wait for the page table's, so 2 to 4 stages have one step of them in flight, 5 and 6 have two.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Tuning:
    """Blocks of prefill and decode, the most splits of a decoding sequence and the fewest keys in a split.

    `num_splits` 0: no split-KV decode, the combine kernel alone does everything.
    """

    prefill: Blocks
    decode: Blocks
    num_splits: int
    min_split: int


def default_tuning(
    head_dim: int, group: int, kv_heads: int, dot_dtype: torch.dtype, cache_dtype: torch.dtype, capability: int
) -> Tuning:
    """Blocks that fit the GPU's shared memory; splits that fill about 128 processors with one sequence."""
    width = max(16, triton.next_power_of_2(head_dim))
    small = capability == _SMALL_SHARED
    rows = max(16, triton.next_power_of_2(group))
    num_splits = min(64, max(8, triton.next_power_of_2(max(1, 128 // kv_heads))))
    if dot_dtype == torch.float32:  # for exactness, without tensor cores
        narrow = width <= 64
        prefill = Blocks(max(32, rows), 32 if narrow else 16, 4 if narrow else 8, 2)
        decode = Blocks(rows, 32 if narrow else 16, 4, 2)
    else:
        eight_bit = cache_dtype.itemsize == 1
        if width <= 64:
            prefill = Blocks(max(128, rows), 64, 8 if eight_bit else 4, 2 if small else 3)
        elif width == 128:
            prefill = Blocks(max(64 if small else 128, rows), 64, 4 if small else 8, 2)
        else:
            prefill = Blocks(max(64, rows), 32, 4 if small else 8, 1 if small else 2)
        keys = (64 if eight_bit else 32) if width > 128 else (128 if eight_bit else 64)
        decode = Blocks(rows, keys // 2 if small else keys, 8 if width > 128 else 4, 2 if small else 5)
    return Tuning(prefill, decode, num_splits, 512)
