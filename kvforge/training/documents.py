"""Training sequences: facts among filler, then many questions with answers, and a loss weight per token."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvforge.tasks import TASKS, filler
from kvforge.tasks.item import Item
from kvforge.tasks.prompt import scatter
from kvforge.training.tokenizer import BOS_ID, EOS_ID

TASK_NAMES = tuple(TASKS)
Encode = Callable[[str], list[int]]

TEXT_WEIGHT, LEAD_WEIGHT, ANSWER_WEIGHT = 0.02, 0.2, 1.0
DEFAULT_MIX: tuple[tuple[str, float], ...] = (
    ("needle_single", 0.45),
    ("quoting", 0.2),
    ("list_recall", 0.15),
    ("variables", 0.12),
    ("arithmetic", 0.08),
)


@dataclass(frozen=True)
class Batch:
    """input_ids, targets [B, T] int64; weight [B, T] fp32 of predicting targets[b, t] at position t.

    `task` [B, T] int64 is the index in `TASK_NAMES` of targets that belong to an answer (full stop included),
    else -1.
    """

    input_ids: Tensor
    targets: Tensor
    weight: Tensor
    task: Tensor


@dataclass
class Tokens:
    """Ids of one sequence and, for each id as a target, its loss weight and task (-1: no answer)."""

    ids: list[int]
    weight: list[float]
    task: list[int]

    def add(self, ids: list[int], weight: float, task: int = -1) -> None:
        self.ids += ids
        self.weight += [weight] * len(ids)
        self.task += [task] * len(ids)


def answer_tokens(name: str, item: Item, encode: Encode, with_question: bool) -> Tokens:
    """The lines that ask for and answer an item."""
    tokens = Tokens([], [], [])
    if with_question:
        tokens.add(encode(f"\nQuestion: {item.question}"), TEXT_WEIGHT)
    tokens.add(encode(f"\nAnswer: {item.lead}"), LEAD_WEIGHT if with_question else TEXT_WEIGHT)
    tokens.add(encode(f"{item.answer}."), ANSWER_WEIGHT, TASK_NAMES.index(name))
    return tokens


def make_document(
    rng: random.Random, length: int, encode: Encode, mix: Sequence[tuple[str, float]] = DEFAULT_MIX
) -> Tokens:
    """Exactly `length` tokens; ends in `</s>`, those after the first with weight 0.

    The share of the facts and their questions in the sequence is drawn from 5 to 100 per cent.
    """
    names, shares = zip(*mix, strict=True)
    room = length - 12  # the first word, without its space, may be several tokens
    budget = room * rng.uniform(0.05, 1.0)
    with_question = rng.random() < 0.6
    used: set[str] = set()
    items: list[Item] = []
    tails: list[Tokens] = []
    while True:
        name = rng.choices(names, shares)[0]
        item = TASKS[name].sample(rng, used)
        tail = answer_tokens(name, item, encode, with_question or not item.statements)
        cost = len(tail.ids) + sum(len(encode(" " + s)) for s in item.statements)
        if cost > room or (items and cost > budget):
            break
        items.append(item)
        tails.append(tail)
        room -= cost
        budget -= cost
    fillers = []
    while True:
        sentence = filler.sentence(rng)
        room -= len(encode(" " + sentence))
        if room < 0:
            break
        fillers.append(sentence)
    document = Tokens([BOS_ID], [0.0], [-1])
    document.add(encode(" ".join(scatter(rng, [list(item.statements) for item in items], fillers))), TEXT_WEIGHT)
    rng.shuffle(tails)
    for tail in tails:
        document.ids += tail.ids
        document.weight += tail.weight
        document.task += tail.task
    document.add([EOS_ID], LEAD_WEIGHT)
    document.add([EOS_ID] * (length - len(document.ids)), 0.0)
    assert len(document.ids) == length
    return document


def make_batch(
    seed_text: str, num: int, length: int, encode: Encode, mix: Sequence[tuple[str, float]] = DEFAULT_MIX
) -> Batch:
    """`num` documents of `length` inputs; the i-th depends on (seed_text, length, i) only."""
    rows = [make_document(random.Random(f"{seed_text}/{length}/{i}"), length + 1, encode, mix) for i in range(num)]
    ids = torch.tensor([row.ids for row in rows])
    weight = torch.tensor([row.weight[1:] for row in rows])
    task = torch.tensor([row.task[1:] for row in rows])
    return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), weight, task)
