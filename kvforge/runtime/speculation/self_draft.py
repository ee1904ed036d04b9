"""Drafts by the engine's own early exit, within the step (self-speculative decoding, arXiv 2309.08168, on a SwiftKV
cut): ``lower`` and the exit's head give token after token, and one ``upper`` computes all of them.

K and V of all layers are complete at the cut and the hidden state of every draft is there, so ``lower`` runs once a
token and ``upper`` once a step. A draft that is not accepted leaves K and V beyond its sequence's computed tokens,
where those of the next tokens will be.
"""

import random
from dataclasses import dataclass, field

import numpy as np
import torch

from kvforge.runtime.early_exit_decode import confidence
from kvforge.runtime.pools import Pools
from kvforge.runtime.sampling_state import SamplingState
from kvforge.runtime.schedule import Schedule
from kvforge.runtime.sequence import Sequence
from kvforge.runtime.session import Session
from kvforge.runtime.slot_table import SlotTable
from kvforge.runtime.step_batch import StepBatch
from kvforge.runtime.survivors import Survivors, gather, starts
from kvforge.runtime.token_draw import draw_tokens

MIN_CONFIDENCE = 0.4
"""Drafting for a sequence ends where the exit's most probable token is less probable than this."""


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
    """Fills ``plan.drafts`` as far as ``plan.draft_rooms`` go, and gathers the survivors of the step with them.

    A greedy sequence's draft is the exit's most probable token; that of a sampled one is drawn from the exit's
    distribution with the random number that its token will be drawn with, which stays the sequence's next. Biases,
    penalties and guides are left out: drafts are guesses.
    """

    def __init__(self, session: Session, page_size: int, min_confidence: float = MIN_CONFIDENCE) -> None:
        self._session, self._page_size, self.min_confidence = session, page_size, min_confidence

    def run(self, hidden: torch.Tensor, plan: Schedule, batch: StepBatch, slots: SlotTable, pools: Pools) -> Survivors:
        """Draft and return the survivors; ``hidden`` is ``lower``'s of ``batch``, the step without these drafts."""
        starts_at = batch.survivor_start.numpy()
        ends = starts_at[1:][np.diff(starts_at) > 0]  # of the plan's survivors, which are the sequences that have any
        survivors = plan.survivors
        drafts = {s: _Draft(s, room, _next_uniform(s, room)) for s, room in plan.draft_rooms.items()}
        last = np.array([end - 1 for s, end in zip(survivors, ends, strict=True) if s in drafts])
        # Copied first: sessions may leave every hidden state in the same place.
        rows = [gather(hidden, batch.survivor_index.numpy())]
        rows += self._draft(
            [drafts[s] for s in survivors if s in drafts], gather(rows[0], last), len(rows[0]), slots, pools
        )
        plan.drafts |= {s: tuple(draft.tokens) for s, draft in drafts.items() if draft.tokens}
        return self._survivors(rows, survivors, ends, drafts, slots)

    def _draft(
        self, active: list[_Draft], state: torch.Tensor, num_rows: int, slots: SlotTable, pools: Pools
    ) -> list[torch.Tensor]:
        """Draft until nobody has room or is sure; returns the hidden states of the drafts, whose rows are counted from
        ``num_rows``. ``state`` are those of the last tokens of ``active``."""
        found: list[torch.Tensor] = []
        while active:
            logits = self._session.early_exit(state, torch.arange(len(active), dtype=torch.int32))
            active = self._choose(active, logits)
            if not active:
                break
            state = self._lower(active, slots, pools)
            found.append(state)
            for row, draft in enumerate(active, start=num_rows):
                draft.rows.append(row)
            num_rows += len(active)
            going = np.flatnonzero([len(draft.tokens) < draft.room for draft in active])
            if len(going) < len(active):
                active, state = [active[row] for row in going], gather(state, going)
        return found

    def _choose(self, active: list[_Draft], logits: torch.Tensor) -> list[_Draft]:
        """Give each sequence that the exit is sure about its next draft; returns those. A token that ends a sequence is
        left to the full model: nothing comes after it."""
        tokens = torch.from_numpy(logits.numpy().argmax(-1))
        drawn = [row for row, draft in enumerate(active) if draft.uniform]
        if drawn:
            tokens[drawn] = _draw(logits[drawn], [active[row] for row in drawn])
        sure = (confidence(logits) >= self.min_confidence).tolist()
        going = []
        for draft, token, is_sure in zip(active, tokens.tolist(), sure, strict=True):
            if is_sure and token not in draft.sequence.stop_ids:
                draft.tokens.append(token)
                going.append(draft)
        return going

    def _lower(self, active: list[_Draft], slots: SlotTable, pools: Pools) -> torch.Tensor:
        """Run ``lower`` on the newest draft of each sequence; returns a copy of the hidden states."""
        positions = np.array([draft.sequence.length + len(draft.tokens) - 1 for draft in active], dtype=np.int32)
        table = slots.page_table[[draft.sequence.slot for draft in active], : positions.max() // self._page_size + 1]
        pages = table[np.arange(len(active)), positions // self._page_size]
        hidden = self._session.lower(
            torch.tensor([draft.tokens[-1] for draft in active], dtype=torch.int32),
            torch.from_numpy(positions),
            torch.from_numpy(pages * self._page_size + positions % self._page_size),
            torch.arange(len(active) + 1, dtype=torch.int32),
            torch.from_numpy(positions + 1),
            torch.from_numpy(table),
            pools,
        )
        return hidden.clone()

    def _survivors(
        self,
        hidden: list[torch.Tensor],
        sequences: list[Sequence],
        ends: np.ndarray,
        drafts: dict[Sequence, _Draft],
        slots: SlotTable,
    ) -> Survivors:
        """Put each sequence's drafts behind its rows of the step, which end at ``ends``."""
        order: list[int] = []
        counts = np.zeros(len(sequences), dtype=np.int32)
        kv_length = np.zeros(len(sequences), dtype=np.int32)
        begin = 0
        for index, (sequence, end) in enumerate(zip(sequences, ends.tolist(), strict=True)):
            draft = drafts.get(sequence)
            own = [*range(begin, end), *(draft.rows if draft else ())]
            given = end - begin - 1  # drafts that the sequence had before the step
            kv_length[index] = sequence.length + given + (len(draft.rows) if draft else 0)
            counts[index] = len(own)
            order += own
            begin = end
        positions = np.concatenate(
            [np.arange(n - c, n, dtype=np.int32) for n, c in zip(kv_length, counts, strict=True)]
        )
        width = -(-int(kv_length.max()) // self._page_size)
        return Survivors(
            gather(torch.cat(hidden), np.array(order)),
            starts(counts),
            torch.from_numpy(positions),
            torch.from_numpy(kv_length),
            torch.from_numpy(slots.page_table[[s.slot for s in sequences], :width]),
        )


def _next_uniform(sequence: Sequence, count: int) -> list[float]:
    """Return the random numbers of a sampled sequence's next tokens, without taking them; none of a greedy one."""
    state: SamplingState | None = sequence.sampling
    if state is None or state.params.greedy:
        return []
    copy = random.Random()
    copy.setstate(state.random.getstate())
    return [copy.random() for _ in range(count)]


def _draw(logits: torch.Tensor, drafts: list[_Draft]) -> torch.Tensor:
    """Draw a token for each draft as the sampler would from these logits."""
    states: list[SamplingState] = [draft.sequence.sampling for draft in drafts]
    params = [state.params for state in states]
    vocab_size = logits.shape[1]
    return draw_tokens(
        logits,
        torch.tensor([max(p.temperature, 1e-6) for p in params]),
        torch.tensor([min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size for p in params]),
        torch.tensor([max(state.top_p, 1e-6) for state in states]),
        torch.tensor([p.min_p for p in params]),
        torch.tensor([draft.uniform[len(draft.tokens)] for draft in drafts]),
    )
