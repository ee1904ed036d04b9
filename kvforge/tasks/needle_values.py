"""Multi-value and multi-query needles (RULER, arXiv 2404.06654, section 3): several numbers make one answer."""

import random

from kvforge.tasks.item import Item, Task, fresh
from kvforge.tasks.needle import place
from kvforge.tasks.words import NAMES


def number(rng: random.Random) -> str:
    return str(rng.randrange(1000, 10000))


def sample_values(rng: random.Random, used: set[str]) -> Item:
    """One place with three numbers, told one by one."""
    key = fresh(rng, used, place)
    numbers = [number(rng) for _ in range(3)]
    return Item(
        tuple(f"A secret number of the {key} is {value}." for value in numbers),
        f"What are all three secret numbers of the {key}, in order?",
        f"The secret numbers of the {key} are",
        f" {', '.join(numbers)}",
    )


def sample_queries(rng: random.Random, used: set[str]) -> Item:
    """Three people with a number each, asked for together and in another order."""
    names = [fresh(rng, used, lambda r: r.choice(NAMES)) for _ in range(3)]
    numbers = {name: number(rng) for name in names}
    statements = tuple(f"The secret number of {name} is {numbers[name]}." for name in names)
    rng.shuffle(names)
    listed = f"{names[0]}, {names[1]} and {names[2]}"
    return Item(
        statements,
        f"What are the secret numbers of {listed}?",
        f"The secret numbers of {listed} are",
        f" {', '.join(numbers[name] for name in names)}",
    )


VALUES = Task(
    "needle_values", "three numbers of each of three places, all of one listed in order", sample_values, distractors=2
)
QUERIES = Task(
    "needle_queries",
    "one number of each of six people, three of them asked for together",
    sample_queries,
    distractors=1,
)
