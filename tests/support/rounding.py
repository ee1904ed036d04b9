"""How far two orders of the same fp32 sums may lie apart, on any CPU: which kernel a matrix product runs, and so the
order of its sums, depends on the CPU and on the number of rows."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from kvforge.distill import DistillConfig
from kvforge.distill.schedule import learning_rate

EPSILON = torch.finfo(torch.float32).eps


def rounding_of(*lengths: int) -> float:
    """Relative difference of two orders of sums that feed each other, of so many terms each: every addition rounds by
    half an epsilon at most, in either order."""
    return sum(lengths) * EPSILON


def largest_updates(config: DistillConfig, steps: int) -> list[float]:
    """The farthest that AdamW moves a weight in each step, whatever the gradients are, without its decay.

    Step t moves by rate * m / (sqrt(v) + eps), where m and v are weighted means of t gradients and of their squares.
    By Cauchy and Schwarz |m| / sqrt(v) is at most the root of the sum of (weight in m)^2 / (weight in v).
    """
    first, second = config.betas
    moves = []
    for step in range(1, steps + 1):
        in_mean = [(1 - first) * first**age / (1 - first**step) for age in range(step)]
        in_square = [(1 - second) * second**age / (1 - second**step) for age in range(step)]
        ratio = math.sqrt(sum(a * a / b for a, b in zip(in_mean, in_square, strict=True)))
        moves.append(learning_rate(config, step - 1, steps) * ratio)
    return moves


def assert_trained_alike(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], config: DistillConfig) -> None:
    """Two trainings that differ by rounding alone have the same weights, but for those whose gradient nearly vanished.

    A step divides each gradient by its own size. Where the gradient of a weight is a thousandth of the others', its
    rounding error, which is as large as theirs, may turn the whole update: so no weight may be farther off than two
    updates in opposite directions in every step. Elsewhere the updates agree to a hundredth. A gradient sums over
    hundreds of tokens, which rounds by 3e-5 of its terms; to be within a factor of a hundred of that in one of 5 steps
    is the lot of a weight in a hundred.
    """
    assert found.keys() == expected.keys()
    moves = largest_updates(config, config.max_steps)
    for name, tensor in expected.items():
        off = (found[name] - tensor).abs()
        assert off.max() <= 2 * sum(moves), name
        assert (off > 0.01 * config.lr).sum() <= math.ceil(off.numel() / 100), name
