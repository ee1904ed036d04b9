"""Drafts by the engine's own early exit, within the step (self-speculative decoding, arXiv 2309.08168, on a SwiftKV
cut): ``lower`` and the exit's head give token after token, and one ``upper`` computes all of them.

K and V of all layers are complete at the cut and the hidden state of every draft is there, so ``lower`` runs once a
token and ``upper`` once a step. A draft that is not accepted leaves K and V beyond its sequence's computed tokens,
where those of the next tokens will be.
"""

import itertools
from dataclasses import dataclass, field

import numpy as np
import torch

from kvforge.runtime.config import RuntimeConfig
from kvforge.runtime.requests.sequence import Sequence
from kvforge.runtime.sampling.draw import draw_tokens
from kvforge.runtime.sampling.filters import Filters
from kvforge.runtime.sampling.state import SamplingState
from kvforge.runtime.scheduling.schedule import Schedule
from kvforge.runtime.scheduling.slot_table import SlotTable
from kvforge.runtime.sessions.inputs import LowerStep, UpperStep
from kvforge.runtime.sessions.pools import Pools
from kvforge.runtime.sessions.session import Session
from kvforge.runtime.step.batch import StepBatch
from kvforge.runtime.step.early_exit import confidence
from kvforge.runtime.step.survivors import all_rows, gather

MIN_CONFIDENCE = 0.8
"""Drafting for a sequence ends where the exit's most probable token is less probable than this: a draft costs the time
of ``lower``, about half a token's, so one that is seldom right costs more than it gives."""


@dataclass
class _Draft:
    """What one sequence has drafted: tokens, and the row of each one's hidden state."""

    sequence: Sequence
    room: int
    uniform: list[float]
    """The sequence's next random numbers, one a draft; empty where it is greedy."""
    tokens: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)


class SelfDraft:
    """Fills ``plan.drafts`` as far as ``plan.draft_limits`` go, and gathers the survivors of the step with them.

    A greedy sequence's draft is the exit's most probable token; that of a sampled one is drawn from the exit's
    distribution with the random number that its token will be drawn with, which stays the sequence's next. Biases,
    penalties and guides are left out: drafts are guesses.
    """

    def __init__(self, session: Session, config: RuntimeConfig, min_confidence: float = MIN_CONFIDENCE) -> None:
        self._session, self._page_size, self.min_confidence = session, config.page_size, min_confidence
        self._state = config.kv_policy.keeping.make_input_builder(config.page_size, config.max_num_seqs, 1)
        self._arange = torch.arange(config.max_num_seqs + 1, dtype=torch.int32)

    def run(self, hidden: torch.Tensor, plan: Schedule, batch: StepBatch, slots: SlotTable, pools: Pools) -> UpperStep:
        """Draft and return the survivors; ``hidden`` is ``lower``'s of ``batch``, the step without these drafts."""
        survivors = plan.survivors
        ends = [end for start, end in itertools.pairwise(batch.survivor_start.tolist()) if end > start]
        drafts = {s: _Draft(s, room, _next_uniform(s, room)) for s, room in plan.draft_limits.items()}
        last = [end - 1 for sequence, end in zip(survivors, ends, strict=True) if sequence in drafts]
        # Copied first: sessions may leave every hidden state in the same place.
        step = gather(hidden, batch.survivor_index.numpy())
        state = step if len(last) == len(step) else gather(step, np.array(last))
        later = self._draft([drafts[s] for s in survivors if s in drafts], state, len(step), slots, pools)
        plan.drafts |= {s: tuple(draft.tokens) for s, draft in drafts.items() if draft.tokens}
        return self._survivors([step, *later], survivors, ends, drafts, slots)

    def _draft(
        self, active: list[_Draft], state: torch.Tensor, num_rows: int, slots: SlotTable, pools: Pools
    ) -> list[torch.Tensor]:
        """Draft until nobody has room or is sure; returns the hidden states of the drafts, whose rows are counted from
        ``num_rows``. ``state`` are those of the last tokens of ``active``."""
        found: list[torch.Tensor] = []
        while active:
            active = self._choose(active, self._session.early_exit(state, self._arange[: len(active)]))
            if not active:
                break
            state = self._lower(active, slots, pools)
            found.append(state)
            for row, draft in enumerate(active, start=num_rows):
                draft.rows.append(row)
            num_rows += len(active)
            going = [row for row, draft in enumerate(active) if len(draft.tokens) < draft.room]
            if len(going) < len(active):
                active, state = [active[row] for row in going], gather(state, np.array(going, dtype=np.int64))
        return found

    def _choose(self, active: list[_Draft], logits: torch.Tensor) -> list[_Draft]:
        """Give each sequence that the exit is sure about its next draft; returns those. A token that ends a sequence is
        left to the full model: nothing comes after it."""
        tokens = logits.numpy().argmax(-1).tolist()
        drawn = [row for row, draft in enumerate(active) if draft.uniform]
        if drawn:
            uniform = torch.tensor([active[row].uniform[len(active[row].tokens)] for row in drawn])
            states: list[SamplingState] = [active[row].sequence.sampling for row in drawn]
            filters = Filters.of(states, logits[drawn])
            for row, token in zip(drawn, draw_tokens(logits[drawn], filters, uniform).tolist(), strict=True):
                tokens[row] = token
        sure = (confidence(logits) >= self.min_confidence).tolist()
        going = []
        for draft, token, is_sure in zip(active, tokens, sure, strict=True):
            if is_sure and token not in draft.sequence.stop_ids:
                draft.tokens.append(token)
                going.append(draft)
        return going

    def _lower(self, active: list[_Draft], slots: SlotTable, pools: Pools) -> torch.Tensor:
        """Run ``lower`` on the newest draft of each sequence; returns a copy of the hidden states."""
        page_size = self._page_size
        places = [draft.sequence.length + len(draft.tokens) - 1 for draft in active]
        rows = np.array([draft.sequence.slot for draft in active])
        table = slots.page_table[rows, : max(places) // page_size + 1]
        pages = [int(slots.write_table[row, place // page_size]) for row, place in zip(rows, places, strict=True)]
        step = LowerStep(
            torch.tensor([draft.tokens[-1] for draft in active], dtype=torch.int32),
            torch.tensor(places, dtype=torch.int32),
            torch.tensor([page * page_size + p % page_size for page, p in zip(pages, places, strict=True)]).int(),
            self._arange[: len(active) + 1],
            torch.tensor([place + 1 for place in places], dtype=torch.int32),
            torch.from_numpy(table),
            self._state.build(rows, slots, np.array(places) + 1 - slots.num_computed[rows]),
        )
        return self._session.lower(step, pools).clone()

    def _survivors(
        self,
        hidden: list[torch.Tensor],
        sequences: list[Sequence],
        ends: list[int],
        drafts: dict[Sequence, _Draft],
        slots: SlotTable,
    ) -> UpperStep:
        """Put each sequence's drafts behind its rows of the step, which end at ``ends``."""
        order: list[int] = []
        positions: list[int] = []
        starts, kv_length, begin = [0], list[int](), 0
        for sequence, end in zip(sequences, ends, strict=True):
            drafted = drafts[sequence].rows if sequence in drafts else []
            order += [*range(begin, end), *drafted]
            # The rows of the step begin with the sequence's last token; drafts that it came with are behind that.
            kv_length.append(sequence.length + end - begin - 1 + len(drafted))
            positions += range(sequence.length - 1, kv_length[-1])
            starts.append(len(order))
            begin = end
        width = -(-max(kv_length) // self._page_size)
        table_rows = np.array([sequence.slot for sequence in sequences])
        return all_rows(
            gather(torch.cat(hidden), np.array(order)),
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor(positions, dtype=torch.int32),
            torch.tensor(kv_length, dtype=torch.int32),
            torch.from_numpy(slots.page_table[table_rows, :width]),
            self._state.build(table_rows, slots, np.array(kv_length) - slots.num_computed[table_rows]),
        )


def _next_uniform(sequence: Sequence, count: int) -> list[float]:
    """Return the random numbers of a sampled sequence's next tokens, without taking them; none of a greedy one."""
    state: SamplingState | None = sequence.sampling
    if state is None or state.params.greedy:
        return []
    return state.peek(count)
