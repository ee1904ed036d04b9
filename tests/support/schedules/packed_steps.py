"""Random packed steps of several sequences, and what each of their survivors is."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from kvforge.runtime.sessions.inputs import LowerStep
from kvforge.runtime.step.batch import StepBatch


@dataclass(frozen=True)
class PackedStep(StepBatch):
    """One step; ``survivors`` are (sequence, position) in the order of the logits."""

    survivors: list[tuple[int, int]] = field(kw_only=True)


def packed_steps(sequences: list[list[int]], page_size: int, num_pages: int, seed: int) -> Iterator[PackedStep]:
    """Run all tokens of the sequences: prompt chunks, decode steps and both mixed, on permuted pages.

    The first step has no survivors, the last steps one token of each sequence that is left; a prompt chunk has from
    none to all of its tokens as survivors. Sequences without tokens in a step are in it all the same.
    """
    rng = random.Random(seed)
    pages = rng.sample(range(num_pages), num_pages)
    columns = max(-(-len(tokens) // page_size) for tokens in sequences)
    tables = [[pages.pop() for _ in range(columns)] for _ in sequences]
    done = [0] * len(sequences)
    first = True
    while any(begin < len(tokens) for begin, tokens in zip(done, sequences, strict=True)):
        chunks = []
        for begin, tokens in zip(done, sequences, strict=True):
            left = len(tokens) - begin
            most = rng.choice((0, 1, 1, rng.randint(2, 40))) if left > 6 else 1
            chunks.append(min(left, 5 if first else most))
        survivors = [0 if first else rng.choice((1, n, rng.randint(0, n))) if n else 0 for n in chunks]
        if sum(chunks):
            yield _step(sequences, tables, done, chunks, survivors, page_size)
        done = [begin + n for begin, n in zip(done, chunks, strict=True)]
        first = False


def _step(
    sequences: list[list[int]],
    tables: list[list[int]],
    done: list[int],
    chunks: list[int],
    survivors: list[int],
    page_size: int,
) -> PackedStep:
    ids, positions, slots, kept, kept_index = [], [], [], [], []
    query_start, survivor_start = [0], [0]
    for s, (tokens, begin, count, last) in enumerate(zip(sequences, done, chunks, survivors, strict=True)):
        for position in range(begin, begin + count):
            if position >= begin + count - last:
                kept_index.append(len(ids))
                kept.append((s, position))
            ids.append(tokens[position])
            positions.append(position)
            slots.append(tables[s][position // page_size] * page_size + position % page_size)
        query_start.append(len(ids))
        survivor_start.append(len(kept))
    lengths = [begin + count for begin, count in zip(done, chunks, strict=True)]
    lower = (ids, positions, slots, query_start, lengths, tables)
    index, start = (torch.tensor(x, dtype=torch.int32) for x in (kept_index, survivor_start))
    return PackedStep(LowerStep(*(torch.tensor(x, dtype=torch.int32) for x in lower)), index, start, survivors=kept)
