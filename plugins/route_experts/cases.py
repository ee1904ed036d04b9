"""Random cases of route_experts, and the judge of a result."""

import random

import torch
from torch import Tensor

from plugins.agreement import values_differ


def random_case(seed: int, *, small: bool = False) -> tuple:
    """Arguments of `route_experts`: no token, one expert, all experts; ties, and logits far apart."""
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    tokens = rng.choice((0, 1, rng.randint(2, 20 if small else 300)))
    experts = rng.choice((1, 2, 8, rng.randint(3, 40 if small else 300)))
    num_active = rng.choice((1, min(2, experts), min(8, experts), experts))
    logits = torch.randn(tokens, experts, generator=gen) * rng.choice((0.01, 1.0, 30.0))
    if rng.random() < 0.4:  # equals
        logits = logits.round()
    return logits, num_active, rng.random() < 0.5


def difference(args: tuple, got: list[Tensor], want: list[Tensor], *, fused: bool = False) -> str | None:
    """The chosen are the same, ties included; of their weights each is a quotient with a sum over all experts."""
    if not torch.equal(got[0], want[0]):
        return f"experts {got[0][got[0] != want[0]][:3].tolist()} instead of {want[0][got[0] != want[0]][:3].tolist()}"
    return values_differ(got[1], want[1], terms=args[0].shape[1])
