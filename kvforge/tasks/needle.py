"""Needle retrieval: a four-digit number belongs to a place, and is asked for at the end."""

import random

from kvforge.tasks.item import Item, Task, fresh
from kvforge.tasks.words import ADJECTIVES, NOUNS


def place(rng: random.Random) -> str:
    return f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"


def sample(rng: random.Random, used: set[str]) -> Item:
    key = fresh(rng, used, place)
    number = str(rng.randrange(1000, 10000))
    lead = f"The secret number of the {key} is"
    return Item((f"{lead} {number}.",), f"What is the secret number of the {key}?", lead, f" {number}")


SINGLE = Task("needle_single", "one number in the text, asked for by its place", sample)
MULTI = Task("needle_multi", "eight numbers in the text, one asked for by its place", sample, distractors=7)
