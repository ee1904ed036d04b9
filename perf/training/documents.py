"""Training sequences: facts among filler, then many questions with answers, and a loss weight per token."""

import random
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from kvforge.tasks import TASKS, filler, words
from kvforge.tasks.chains import sample_chain
from kvforge.tasks.item import Item, OutOfKeys
from kvforge.tasks.prompt import scatter
from perf.training.config import BOS_ID, EOS_ID, Stage

TASK_NAMES = tuple(TASKS)
"""A batch and the columns of a training's metrics name a task by its place."""

Encode = Callable[[str], list[int]]

TEXT_WEIGHT, LEAD_WEIGHT, ANSWER_WEIGHT = 0.02, 0.2, 1.0


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

    def to(self, device: torch.device) -> "Batch":
        """The batch on a device."""
        return Batch(*(getattr(self, each.name).to(device) for each in fields(self)))


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


def answer_tokens(
    name: str, item: Item, encode: Encode, with_question: bool, first_weight: float = ANSWER_WEIGHT
) -> Tokens:
    """The lines that ask for and answer an item; `first_weight` is that of the answer's first word or digit."""
    tokens = Tokens([], [], [])
    if with_question:
        tokens.add(encode(f"\nQuestion: {item.question}"), TEXT_WEIGHT)
    tokens.add(encode(f"\nAnswer: {item.lead}"), LEAD_WEIGHT if with_question else TEXT_WEIGHT)
    first = 2 if item.answer.startswith(' "') else 1
    ids, task = encode(f"{item.answer}."), TASK_NAMES.index(name)
    tokens.add(ids[:first], first_weight, task)
    tokens.add(ids[first:], ANSWER_WEIGHT, task)
    return tokens


def make_pairs(rng: random.Random, length: int, encode: Encode) -> Tokens:
    """Words each followed by a digit or a thing; then some of them again, in any order, with what followed.

    The densest form of retrieval: a third or more of the targets are answers. They count for no task.
    """
    document = Tokens([BOS_ID], [0.0], [-1])
    keys = rng.sample(words.ADJECTIVES + words.NOUNS + words.NAMES, rng.randint(3, length // 5))
    pairs = [
        (encode(f" {key}"), encode(f" {rng.randrange(10) if rng.random() < 0.6 else rng.choice(words.ITEMS)}"))
        for key in keys
    ]
    for key, value in pairs:
        document.add(key + value, 0.0)
    document.add(encode("\n"), 0.0)
    while True:
        key, value = rng.choice(pairs)
        if len(document.ids) + len(key) + len(value) >= length:
            break
        document.add(key, 0.0)
        document.add(value, ANSWER_WEIGHT)
    document.add([EOS_ID] * (length - len(document.ids)), 0.0)
    return document


def make_chains(rng: random.Random, length: int, encode: Encode, stage: Stage) -> Tokens:
    """Chains of amounts among each other and among filler; then any of their names are asked for, while there is room.

    Asked for the last names only, a model learns to name an amount that was not asked for yet, and stays there.
    """
    room = length - 12
    budget = room * rng.uniform(stage.min_density, 1.0)
    with_question = rng.random() < stage.question_share
    used: set[str] = set()
    chains: list[list[Item]] = []
    told = 0
    while True:
        hops = min(rng.randint(0, stage.chain_hops), len(words.NAMES) - len(used) - 1)
        if hops < 0:
            break
        chain = sample_chain(rng, used, hops)
        cost = sum(len(encode(" " + statement)) for statement in chain[-1].statements)
        if told + cost > budget / 2 and chains:
            break
        told += cost
        chains.append(chain)
    room, budget = room - told, budget - told
    asked = [(f"chain_{hops}", item) for chain in chains for hops, item in enumerate(chain)]
    rng.shuffle(asked)
    tails: list[Tokens] = []
    for name, item in asked:
        tail = answer_tokens(name, item, encode, with_question, stage.first_weight)
        if len(tail.ids) > (budget if tails else room):
            break
        room, budget = room - len(tail.ids), budget - len(tail.ids)
        tails.append(tail)
    return assemble(rng, length, encode, [list(chain[-1].statements) for chain in chains], room, tails)


def assemble(
    rng: random.Random, length: int, encode: Encode, groups: list[list[str]], room: int, tails: list[Tokens]
) -> Tokens:
    """Statements scattered among `room` tokens of filler, then the tails in any order; exactly `length` tokens."""
    fillers = []
    while True:
        sentence = filler.sentence(rng)
        room -= len(encode(" " + sentence))
        if room < 0:
            break
        fillers.append(sentence)
    document = Tokens([BOS_ID], [0.0], [-1])
    document.add(encode(" ".join(scatter(rng, groups, fillers))), TEXT_WEIGHT)
    rng.shuffle(tails)
    for tail in tails:
        document.ids += tail.ids
        document.weight += tail.weight
        document.task += tail.task
    document.add([EOS_ID], LEAD_WEIGHT)
    document.add([EOS_ID] * (length - len(document.ids)), 0.0)
    assert len(document.ids) == length
    return document


def make_document(rng: random.Random, length: int, encode: Encode, stage: Stage) -> Tokens:
    """Exactly `length` tokens as `stage` describes them; ends in `</s>`, those after the first with weight 0."""
    if stage.pair_share and rng.random() < stage.pair_share:
        return make_pairs(rng, length, encode)
    if stage.chain_hops:
        return make_chains(rng, length, encode, stage)
    names, shares = zip(*stage.mix, strict=True)
    room = length - 12  # the first word, without its space, may be several tokens
    budget = room * rng.uniform(stage.min_density, 1.0)
    with_question = rng.random() < stage.question_share
    used: set[str] = set()
    drawn: set[str] = set()
    items: list[Item] = []
    tails: list[Tokens] = []
    num_misfits = 0
    while num_misfits < stage.num_misfits:
        name = rng.choices(names, shares)[0]
        if TASKS[name].once and name in drawn:
            num_misfits += 1
            continue
        try:
            item = TASKS[name].sample(rng, used)
        except OutOfKeys:
            break
        tail = answer_tokens(name, item, encode, with_question or not item.statements, stage.first_weight)
        cost = len(tail.ids) + sum(len(encode(" " + s)) for s in item.statements)
        if cost > room or (items and cost > budget):
            num_misfits += 1
            continue
        items.append(item)
        drawn.add(name)
        tails.append(tail)
        room -= cost
        budget -= cost
    return assemble(rng, length, encode, [list(item.statements) for item in items], room, tails)


def make_batch(seed_text: str, stage: Stage, encode: Encode) -> Batch:
    """The stage's `sequences` documents of `length` inputs; the i-th depends on (seed_text, stage, i) only."""
    rows = [
        make_document(random.Random(f"{seed_text}/{stage.length}/{i}"), stage.length + 1, encode, stage)
        for i in range(stage.sequences)
    ]
    ids = torch.tensor([row.ids for row in rows])
    weight = torch.tensor([row.weight[1:] for row in rows])
    task = torch.tensor([row.task[1:] for row in rows])
    return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), weight, task)
