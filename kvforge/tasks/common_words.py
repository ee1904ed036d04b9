"""Common words (RULER, arXiv 2404.06654, section 3): the most frequent words of a list must be counted out."""

import random

from kvforge.tasks.item import Item, Task
from kvforge.tasks.words import ITEMS

NUM_COMMON, NUM_RARE, REPEATS, PER_SENTENCE = 3, 18, 6, 6


def sample(rng: random.Random, used: set[str]) -> Item:
    """Three words six times each among eighteen words once each, six to a sentence; the answer is alphabetical."""
    del used
    words = rng.sample(ITEMS, NUM_COMMON + NUM_RARE)
    common, rare = words[:NUM_COMMON], words[NUM_COMMON:]
    listed = common * REPEATS + rare
    rng.shuffle(listed)
    return Item(
        tuple(
            f"The list goes on with {', '.join(listed[start : start + PER_SENTENCE])}."
            for start in range(0, len(listed), PER_SENTENCE)
        ),
        "Which three words are most frequent in the list, in alphabetical order?",
        "The most frequent words are",
        f" {', '.join(sorted(common))}",
    )


TASK = Task("common_words", "the three words that a list of 36 repeats most, in alphabetical order", sample, once=True)
