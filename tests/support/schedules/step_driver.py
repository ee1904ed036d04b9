"""Runs one sequence through a session's graphs in chunks of any size, on pages in any order."""

import itertools
import random
from collections.abc import Sequence

import torch
from torch import Tensor

from kvforge.runtime.sessions.inputs import LowerStep
from kvforge.runtime.sessions.session import Session
from kvforge.runtime.step.batch import StepBatch

NUM_STATES = 128
"""Rows for the states of a sequence: each step goes on from one and leaves others, of which one may be the same."""


class StepDriver:
    """A one-sequence runner without a scheduler: the shortest correct use of the two graphs."""

    def __init__(self, session: Session, num_pages: int = 64, seed: int = 0) -> None:
        self.session = session
        is_hybrid = session.manifest.model.linear is not None
        self.pools = session.allocate_pools(num_pages, **({"state_rows": NUM_STATES} if is_hybrid else {}))
        for tensor in itertools.chain.from_iterable(self.pools):
            tensor.fill_(float("nan") if tensor.is_floating_point() else 127)
        self.pages = random.Random(seed).sample(range(num_pages), num_pages)
        self.seals = session.manifest.policy.sealing is not None
        self.written = [index % len(self.pools[0][0]) for index in range(num_pages)] if self.seals else self.pages
        self.length = 0
        self.state = -1 if is_hybrid else None
        self.choose = random.Random(seed)

    def run(self, tokens: Sequence[int], num_survivors: int | None = None) -> Tensor:
        """Run one chunk; returns logits of its last ``num_survivors`` tokens (default: all of them)."""
        count = len(tokens)
        survivors = count if num_survivors is None else num_survivors
        page_size = self.session.manifest.page_size
        positions = torch.arange(self.length, self.length + count, dtype=torch.int32)
        slots = [self.written[p // page_size] * page_size + p % page_size for p in positions.tolist()]
        self.length += count
        lower = LowerStep(
            torch.tensor(tokens, dtype=torch.int32),
            positions,
            torch.tensor(slots, dtype=torch.int32),
            torch.tensor([0, count], dtype=torch.int32),
            torch.tensor([self.length], dtype=torch.int32),
            torch.tensor([self.pages], dtype=torch.int32),
            (torch.tensor([self.written], dtype=torch.int32),) if self.seals else (),
            self._rows(count, survivors),
        )
        kept, starts = torch.arange(count - survivors, count), torch.tensor([0, survivors])
        reads_states = bool(self.session.manifest.model.upper_linear)
        batch = StepBatch(lower, kept.int(), starts.int(), reads_states=reads_states)
        return self.session.upper(batch.upper(self.session.lower(lower, self.pools)), self.pools)

    def _rows(self, count: int, survivors: int) -> tuple[Tensor, ...]:
        """The rows of states that a step of so many tokens reads and writes, those of all survivors where layers above
        a cut read them; none where no layer has one."""
        if self.state is None:
            return ()
        kept = max(survivors, 1) if self.session.manifest.model.upper_linear else 1
        read, rows = self.state, self.choose.sample(range(NUM_STATES), min(kept, count))
        written = [-1] * (count - len(rows)) + rows
        self.state = rows[-1] if rows else read
        return torch.tensor([read], dtype=torch.int32), torch.tensor(written, dtype=torch.int32)
