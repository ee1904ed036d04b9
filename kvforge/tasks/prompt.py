"""Evaluation prompts: an item hidden in filler, cut to a number of tokens, with its question at the end."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from kvforge.tasks import TASKS, filler
from kvforge.tasks.item import Item

CountTokens = Callable[[str], int]


@dataclass(frozen=True)
class Example:
    """A prompt and the text that must follow it, without outer spaces and the final full stop."""

    prompt: str
    answer: str


def question_block(item: Item) -> str:
    """The text up to where the answer starts, on lines of its own."""
    return f"\nQuestion: {item.question}\nAnswer: {item.lead}"


def count_following(count_tokens: CountTokens) -> CountTokens:
    """Return a counter of the tokens that a sentence adds to a text that ends with another one.

    Some tokenizers put a mark before a text, which a prompt has once and not before every sentence.
    """
    stop = count_tokens(".")
    return lambda sentence: count_tokens(f". {sentence}") - stop


def scatter(rng: random.Random, groups: list[list[str]], fillers: list[str]) -> list[str]:
    """Statements at random places among the filler sentences; each group keeps its order."""
    slots = [-1] * len(fillers)
    for index, group in enumerate(groups):
        slots += [index] * len(group)
    rng.shuffle(slots)
    queues = [iter(group) for group in [*groups, fillers]]
    return [next(queues[slot]) for slot in slots]


def make_example(task_name: str, length: int, count_tokens: CountTokens, rng: random.Random) -> Example:
    """A prompt of at most `length` tokens, short of it by less than one filler sentence (12 tokens).

    Raises KeyError for an unknown task, ValueError when `length` cannot hold the facts and the question.
    """
    task = TASKS[task_name]
    used: set[str] = set()
    items = [task.sample(rng, used) for _ in range(1 + task.distractors)]
    asked, tail = items[0], question_block(items[0])
    added = count_following(count_tokens)
    room = length - count_tokens(tail) - sum(added(statement) for item in items for statement in item.statements)
    if room < 0:
        raise ValueError(f"length {length} is too short for task {task_name}: it needs {length - room} tokens")
    fillers = []
    while True:
        sentence = filler.sentence(rng)
        room -= added(sentence)
        if room < 0:
            break
        fillers.append(sentence)
    sentences = scatter(rng, [list(item.statements) for item in items], fillers)
    return Example(" ".join(sentences) + tail, asked.answer.strip())


def make_examples(task_name: str, length: int, count_tokens: CountTokens, num: int, seed: int) -> list[Example]:
    """`num` prompts; the i-th depends on (task, length, seed, i) only."""
    return [
        make_example(task_name, length, count_tokens, random.Random(f"{task_name}/{length}/{seed}/{i}"))
        for i in range(num)
    ]
