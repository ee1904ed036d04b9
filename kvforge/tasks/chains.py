"""Variable tracking over many hops: one amount handed on from person to person, and the last one is asked for."""

import random
from functools import partial
from itertools import pairwise

from kvforge.tasks.item import Item, Task, fresh
from kvforge.tasks.words import NAMES

HOPS = tuple(range(9))
"""Lengths of the chains that there is a task for."""


def sample_chain(rng: random.Random, used: set[str], hops: int) -> list[Item]:
    """A chain of `hops` links, each given after the one it refers to: an item for each of its names, which has the
    statements up to that name."""
    names = [fresh(rng, used, lambda r: r.choice(NAMES)) for _ in range(hops + 1)]
    value = rng.randrange(10, 100)
    links = [f"{b} has the same as {a}." for a, b in pairwise(names)]
    statements = (f"{names[0]} has {value} coins.", *links)
    return [
        Item(statements[: place + 1], f"How many coins does {name} have?", f"{name} has", f" {value} coins")
        for place, name in enumerate(names)
    ]


def sample(rng: random.Random, used: set[str], hops: int) -> Item:
    """A chain of `hops` links; the question is about its last name."""
    return sample_chain(rng, used, hops)[-1]


TASKS = tuple(
    Task(
        f"chain_{hops}",
        f"an amount handed on {hops} times, and the last one's asked for, among two other such chains",
        partial(sample, hops=hops),
        distractors=2,
        is_default=False,
    )
    for hops in HOPS
)
