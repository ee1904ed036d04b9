"""Amounts: people have numbers of coins, and one is asked for by name; the shortest retrieval sentences."""

import random

from kvforge.tasks.item import Item, Task, fresh
from kvforge.tasks.words import NAMES


def sample(rng: random.Random, used: set[str]) -> Item:
    name = fresh(rng, used, lambda r: r.choice(NAMES))
    amount = f" {rng.randrange(10, 100)} coins"
    return Item((f"{name} has{amount}.",), f"How many coins does {name} have?", f"{name} has", amount)


TASK = Task("amounts", "what eight people have, one asked for by name", sample, distractors=7)
