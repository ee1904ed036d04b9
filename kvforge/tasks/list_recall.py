"""List recall: the things kept in a place, to be listed in the same order."""

import random

from kvforge.tasks.item import Item, Task, fresh
from kvforge.tasks.needle import place
from kvforge.tasks.words import ITEMS


def sample(rng: random.Random, used: set[str]) -> Item:
    key = fresh(rng, used, place)
    things = ", ".join(rng.sample(ITEMS, rng.randint(3, 6)))
    lead = f"The things in the {key} are"
    return Item((f"{lead} {things}.",), f"Which things are in the {key}?", lead, f" {things}")


TASK = Task("list_recall", "three to six things kept in a place, listed in order", sample, distractors=2)
