"""Variable tracking: a chain of people who hold the same amount, given link by link."""

import random
from itertools import pairwise

from kvforge.tasks.item import Item, Task, fresh
from kvforge.tasks.words import NAMES


def sample(rng: random.Random, used: set[str]) -> Item:
    """A chain of two or three names; the question is about any of them."""
    names = [fresh(rng, used, lambda r: r.choice(NAMES)) for _ in range(rng.randint(2, 3))]
    value = str(rng.randrange(10, 100))
    statements = [f"{names[0]} has {value} coins."]
    statements += [f"{b} has the same as {a}." for a, b in pairwise(names)]
    asked = rng.choice(names[1:]) if rng.random() < 0.75 else names[0]
    return Item(tuple(statements), f"How many coins does {asked} have?", f"{asked} has", f" {value} coins")


TASK = Task("variables", "a chain of two or three equal amounts, one of them asked for", sample, distractors=1)
