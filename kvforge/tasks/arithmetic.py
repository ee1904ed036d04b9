"""Small arithmetic: sums and differences of numbers up to 20; nothing in the text helps."""

import random

from kvforge.tasks.item import Item, Task


def sample(rng: random.Random, used: set[str]) -> Item:
    del used
    a, b = rng.randrange(21), rng.randrange(21)
    word, result = ("plus", a + b) if rng.random() < 0.5 or b > a else ("minus", a - b)
    return Item((), f"What is {a} {word} {b}?", f"{a} {word} {b} is", f" {result}")


TASK = Task("arithmetic", "a sum or difference of two numbers up to 20", sample)
