"""Questions about short paragraphs among others (RULER, arXiv 2404.06654, section 3): one fact, or two in a chain."""

import random

from kvforge.tasks import filler
from kvforge.tasks.item import Item, Task, fresh
from kvforge.tasks.needle import place
from kvforge.tasks.words import ITEMS, NAMES


def person(rng: random.Random, used: set[str]) -> str:
    return fresh(rng, used, lambda r: r.choice(NAMES))


def sample_single(rng: random.Random, used: set[str]) -> Item:
    """A paragraph on a person: home, friend and treasure, with a plain sentence between; one of the three is asked."""
    name, friend, home, thing = person(rng, used), person(rng, used), fresh(rng, used, place), rng.choice(ITEMS)
    facts = [
        f"{name} lives in the {home}.",
        f"The best friend of {name} is {friend}.",
        f"{name} collects every {thing}.",
    ]
    rng.shuffle(facts)
    facts.insert(rng.randint(1, 2), filler.sentence(rng))
    question, lead, answer = rng.choice(
        (
            (f"Where does {name} live?", f"{name} lives in the", f" {home}"),
            (f"Who is the best friend of {name}?", f"The best friend of {name} is", f" {friend}"),
            (f"What does {name} collect?", f"{name} collects every", f" {thing}"),
        )
    )
    return Item((" ".join(facts),), question, lead, answer)


def sample_two_hop(rng: random.Random, used: set[str]) -> Item:
    """Somebody lives in a place and the place belongs to another, told apart and in either order."""
    name, owner, home = person(rng, used), person(rng, used), fresh(rng, used, place)
    facts = [f"{name} lives in the {home}.", f"The {home} belongs to {owner}."]
    rng.shuffle(facts)
    return Item(tuple(facts), f"Who owns the home of {name}?", f"The home of {name} belongs to", f" {owner}")


SINGLE = Task("qa_single", "paragraphs on four people, one fact of one of them asked for", sample_single, distractors=3)
TWO_HOP = Task(
    "qa_two_hop",
    "homes of four people and their owners, asked for the owner of one's home",
    sample_two_hop,
    distractors=3,
)
