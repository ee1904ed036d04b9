"""Random cases of chunk_cache_update, and the judge of a result."""

import random

import torch
from torch import Tensor

from plugins.agreement import bits_differ


def random_case(seed: int, *, small: bool = False) -> tuple[Tensor, ...]:
    """Arguments of `chunk_cache_update`: places that are empty, hit or taken by others, sequences without a slot."""
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    sequences, kv_heads = rng.randint(0, 3 if small else 6), rng.randint(1, 3 if small else 8)
    places = rng.choice((0, 1, rng.randint(1, 12 if small else 60)))
    chunks = places + rng.choice((0, 1, rng.randint(0, 2 * places + 20)))
    slots = sequences + rng.randint(0, 2)
    selected = torch.full((sequences, kv_heads, places), -1)
    cached = torch.full((slots, kv_heads, places), -1)
    for s in range(sequences):
        count = rng.choice((places, rng.randint(0, places)))
        for head in range(kv_heads):
            selected[s, head, :count] = torch.randperm(chunks, generator=gen)[:count].sort().values
    for s in range(slots):
        kept = rng.choice((0.0, 0.5, 1.0))
        for head in range(kv_heads):
            cached[s, head] = torch.randperm(chunks, generator=gen)[:places]
        cached[s][torch.rand(kv_heads, places, generator=gen) > kept] = -rng.randint(1, 3)
    slot = torch.randperm(slots, generator=gen)[:sequences]
    slot[torch.rand(sequences, generator=gen) < 0.2] = -rng.randint(1, 3)
    counts = torch.randint(0, 2**40, (slots, kv_heads, 2), generator=gen)
    return selected.int(), cached.int(), counts, slot.int()


def difference(args: tuple, got: list[Tensor], want: list[Tensor], *, fused: bool = False) -> str | None:
    """Lists and counts have one right answer."""
    return next((wrong for pair in zip(got, want, strict=True) if (wrong := bits_differ(*pair))), None)
