"""Which sequences and what learning rate a step has, from the step's number alone."""

import math
from collections.abc import Callable

from kvforge.distill.config import DistillConfig


def learning_rate(config: DistillConfig, step: int, total: int) -> float:
    """Rate of step ``step`` (from 0) of ``total``: a linear warm-up, then the schedule, which would reach 0 at
    ``total``."""
    warmup = round(config.warmup * total)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    done = (step - warmup) / max(1, total - warmup)
    if config.schedule == "cosine":
        return config.lr * (1 + math.cos(math.pi * done)) / 2
    if config.schedule == "linear":
        return config.lr * (1 - done)
    return config.lr


def step_indices(
    order: Callable[[int, int], list[int]], seed: int, num_sequences: int, batch_size: int, step: int
) -> list[int]:
    """The ``batch_size`` sequences of one step: epochs follow each other without a gap, each in its own order
    ``order(seed, epoch)``, so that no batch is short."""
    first = step * batch_size
    orders: dict[int, list[int]] = {}
    chosen = []
    for position in range(first, first + batch_size):
        epoch, place = divmod(position, num_sequences)
        if epoch not in orders:
            orders[epoch] = order(seed, epoch)
        chosen.append(orders[epoch][place])
    return chosen


def share(indices: list[int], rank: int, world: int, micro_batch: int) -> list[list[int]]:
    """The micro-batches of one process: equally many on each, as the collectives of FSDP need."""
    own = len(indices) // world
    mine = indices[rank * own : (rank + 1) * own]
    return [mine[i : i + micro_batch] for i in range(0, own, micro_batch)]
