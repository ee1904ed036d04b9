"""What a task produces: a fact to hide, and a question about it with one right answer."""

import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Item:
    """`statements` go into the text in this order; after `question` and `lead` the model must write `answer`.

    `lead` has no trailing space, `answer` starts with one; the full stop after the answer is not part of it.
    """

    statements: tuple[str, ...]
    question: str
    lead: str
    answer: str


Sampler = Callable[[random.Random, set[str]], Item]
"""Draws an item whose keys are not in the given set, and adds them to it."""


@dataclass(frozen=True)
class Task:
    """A named family of items; a prompt holds the asked item and `distractors` others of its family. Where `once`, a
    text can hold one item only: its question does not say which. One that is not `is_default` runs only where it is
    named."""

    name: str
    description: str
    sample: Sampler
    distractors: int = 0
    once: bool = False
    is_default: bool = True


class OutOfKeys(RuntimeError):
    """The vocabulary has no unused key left."""


def fresh(rng: random.Random, used: set[str], draw: Callable[[random.Random], str]) -> str:
    """A key from `draw` that is not in `used`; it is added. Raises OutOfKeys after 1000 vain draws."""
    for _ in range(1000):
        key = draw(rng)
        if key not in used:
            used.add(key)
            return key
    raise OutOfKeys("the vocabulary has no unused key left; ask for a shorter prompt or fewer items")
