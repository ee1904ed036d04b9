"""Sequences driven through a session's two graphs in mixed steps, factored when told to, without a scheduler."""

import itertools
import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvforge.kv_policies.shadowkv import ShadowKV
from kvforge.kv_policies.shadowkv.factor import factor_prompt
from kvforge.runtime.sessions.inputs import LowerStep
from kvforge.runtime.sessions.session import Session
from kvforge.runtime.step.batch import StepBatch


@dataclass
class Driven:
    """A sequence: tokens computed, pages of its cache and, once factored, what a step says of it."""

    pages: list[int]
    length: int = 0
    shift: int = 0
    slot: int = -1
    shadow_pages: list[int] = field(default_factory=list)
    num_chunks: int = 0
    num_selected: int = 0


class ShadowSteps:
    """Pools that are NaN wherever nothing was written, and sequences on permuted pages, slots and shadow pages."""

    def __init__(self, session: Session, num_seqs: int, tokens_each: int, seed: int = 0) -> None:
        rng = random.Random(seed)
        self.session, self.page_size = session, session.manifest.page_size
        columns = -(-tokens_each // self.page_size)
        num_pages = num_seqs * columns + 2
        self.pools = session.allocate_pools(num_pages, num_pages, num_seqs + 1)
        for tensor in itertools.chain.from_iterable(self.pools):
            tensor.fill_(float("nan") if tensor.is_floating_point() else 3)
        free, shadow = (rng.sample(range(num_pages), num_pages) for _ in range(2))
        self.slots = rng.sample(range(num_seqs + 1), num_seqs)
        self.sequences = [Driven([free.pop() for _ in range(columns)]) for _ in range(num_seqs)]
        self._shadow = [[shadow.pop() for _ in range(columns)] for _ in range(num_seqs)]

    def factor(self, index: int) -> None:
        """Factor a sequence at the end of its prompt; pages that it gives up, and places to be filled, are NaN."""
        sequence, policy = self.sequences[index], self.session.manifest.policy
        assert isinstance(policy, ShadowKV)
        length, num_selected = sequence.length, policy.num_selected(sequence.length)
        exact = policy.num_outlier_chunks * policy.chunk_size + policy.tail_length(length)
        compact = num_selected * policy.chunk_size + exact
        kept = sequence.pages[::-1]  # an order of its own
        tables = (torch.tensor(pages) for pages in (sequence.pages, kept, self._shadow[index]))
        old, new, shadow = tables
        slot = self.slots[index]
        places = torch.arange(num_selected * policy.chunk_size)
        for pool in self.pools:
            factor_prompt(policy, pool, length, old, new, shadow, slot, self.session.rope_tables)
            rows = new[places // self.page_size] * self.page_size + places % self.page_size
            behind = new[-(-compact // self.page_size) :]
            for elements in pool[:2]:
                elements.flatten(0, 1)[rows] = float("nan")
                elements[behind] = float("nan")
        sequence.pages, sequence.shadow_pages = kept, self._shadow[index]
        sequence.slot, sequence.shift = slot, compact - length
        sequence.num_chunks, sequence.num_selected = policy.num_chunks(length), num_selected

    def lower_step(self, chunks: list[list[int]]) -> LowerStep:
        """Return the step of the next tokens of each sequence."""
        ids, positions, slots, start = [], [], [], [0]
        for sequence, tokens in zip(self.sequences, chunks, strict=True):
            for position in range(sequence.length, sequence.length + len(tokens)):
                page, offset = divmod(position + sequence.shift, self.page_size)
                slots.append(sequence.pages[page] * self.page_size + offset)
                positions.append(position)
            ids += tokens
            sequence.length += len(tokens)
            start.append(len(ids))
        lengths = [sequence.length + sequence.shift for sequence in self.sequences]
        width = max(1, *(len(sequence.shadow_pages) for sequence in self.sequences))
        rows = [sequence.shadow_pages or [0] * width for sequence in self.sequences]
        counts = ([getattr(s, name) for s in self.sequences] for name in ("slot", "num_chunks", "num_selected"))
        slot, num_chunks, num_selected = map(int32, counts)
        return LowerStep(
            int32(ids),
            int32(positions),
            int32(slots),
            int32(start),
            int32(lengths),
            int32([sequence.pages for sequence in self.sequences]),
            (slot, int32(rows), num_chunks, num_selected),
        )

    def run(self, chunks: list[list[int]]) -> Tensor:
        """Run one step; returns the logits of each sequence's last token, in their order, of those that have tokens.

        A chunk may be empty: the sequence is in the step without a query.
        """
        step = self.lower_step(chunks)
        has_tokens = [bool(tokens) for tokens in chunks]
        index = [end - 1 for end, there in zip(step.query_start.tolist()[1:], has_tokens, strict=True) if there]
        batch = StepBatch(step, int32(index), int32([0, *itertools.accumulate(has_tokens)]))
        return self.session.upper(batch.upper(self.session.lower(step, self.pools)), self.pools)


PROMPTS = (83, 61, 9)
"""Of a sequence that is factored, one that is while the first decodes, and one that never is."""

TOKENS = 112
"""The most that a sequence of ``mixed_steps`` may come to have."""
STEPS = ((40, 11, 9), (43, 0, 1), (1, 17, 1), (1, 33, 1), (1, 1, 1), (0, 1, 3), (1, 0, 1), (1, 1, 0), (1, 1, 1))
"""Tokens of each sequence in each step: prefill in chunks, mixed steps, decode steps, steps without queries of some."""


def mixed_steps(session: Session) -> list[Tensor]:
    """Return the logits of every one of ``STEPS``; the first two sequences are factored when their prompts are done,
    where the policy is ShadowKV."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(3, session.manifest.vocab_size, (len(PROMPTS), 110), generator=generator).tolist()
    steps, logits = ShadowSteps(session, len(PROMPTS), TOKENS), []
    for counts in STEPS:
        begins = [sequence.length for sequence in steps.sequences]
        chunks = [row[begin : begin + count] for row, begin, count in zip(tokens, begins, counts, strict=True)]
        logits.append(steps.run(chunks).clone())
        for index, (sequence, begin) in enumerate(zip(steps.sequences, begins, strict=True)):
            is_done = begin < PROMPTS[index] == sequence.length
            if is_done and index < 2 and session.manifest.kv_policy == ShadowKV.name:
                steps.factor(index)
    return logits


def int32(values: list) -> Tensor:
    """An int32 tensor."""
    return torch.tensor(values, dtype=torch.int32)
