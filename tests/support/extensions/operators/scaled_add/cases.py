"""Random cases of scaled_add, and the judge of a result."""

import random

import torch
from torch import Tensor

from plugins.agreement import values_differ


def random_case(seed: int, *, small: bool = False) -> tuple:
    """Arguments of `scaled_add`, empty ones too."""
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    shape = rng.choice((0, 1, rng.randint(2, 20 if small else 900))), rng.randint(1, 7)
    return torch.randn(shape, generator=gen), torch.randn(shape, generator=gen), rng.uniform(-2, 2)


def difference(args: tuple, got: list[Tensor], want: list[Tensor], *, fused: bool = False) -> str | None:
    """One product and one sum, which may be fused."""
    return values_differ(got[0], want[0], terms=2)
