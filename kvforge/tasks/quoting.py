"""Quoting: somebody said a run of random words, to be repeated word by word."""

import random

from kvforge.tasks.item import Item, Task, fresh
from kvforge.tasks.words import ITEMS, NAMES


def sample(rng: random.Random, used: set[str]) -> Item:
    name = fresh(rng, used, lambda r: r.choice(NAMES))
    quote = " ".join(rng.choice(ITEMS) for _ in range(rng.randint(4, 9)))
    return Item((f'{name} said "{quote}".',), f"What did {name} say?", f"{name} said", f' "{quote}"')


TASK = Task("quoting", "four to nine random words somebody said, repeated", sample, distractors=2)
