"""Drafts by a draft head (``model_defs.draft_head``), before the step that verifies them.

The head has K and V of *entries*: one of a token whose hidden states are known and the token behind it. They are in the
pages of the sequence, in a pool of the head's own, so that sequences share them as they share prefixes. Where the head
reads nothing above the cut, every token has an entry, at its own place. Otherwise only survivors do: the entries of a
sequence then begin with its first survivor and are packed into its pages from the one of the token behind that, which
no other sequence has. While drafting does not pay, tokens that are generated get no entries; those of later tokens
follow the last ones without a gap, at their true positions. An entry that is not written, or whose page another
sequence has with another next token, costs accuracy of drafts, never of tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from kvforge.runtime.config import RuntimeConfig
from kvforge.runtime.requests.sequence import Sequence, Status
from kvforge.runtime.scheduling.schedule import Schedule
from kvforge.runtime.scheduling.slot_table import SlotTable
from kvforge.runtime.sessions.inputs import DraftStep
from kvforge.runtime.sessions.session import Session
from kvforge.runtime.step.batch import StepBatch
from kvforge.runtime.step.survivors import gather, starts

MAX_WAITING = 64
"""Entries of a sequence that wait to be written together, where nothing is drafted meanwhile."""


@dataclass
class _Waiting:
    """Hidden states of a sequence's newest tokens, whose entries are not written: from position ``first`` on. Those of
    drafts that were not accepted are at its end until the next step."""

    page: int
    """The sequence's page that its entries begin in."""
    base: int
    """What an entry's position is before its place in the pages."""
    first: int
    end: int
    """The position behind them."""
    states: list[torch.Tensor] = field(default_factory=list)

    def keep(self, end: int) -> None:
        """Forget the states from position ``end`` on."""
        if end >= self.end:
            return
        kept, count = list[torch.Tensor](), end - self.first
        for part in self.states:
            if count > 0:
                kept.append(part[:count])
            count -= len(part)
        self.states, self.end = kept, max(end, self.first)

    def skip(self, start: int) -> None:
        """Go on at position ``start``; nothing may wait."""
        self.base += start - self.first
        self.first = self.end = start

    def add(self, states: torch.Tensor) -> None:
        """Note what follows."""
        self.states.append(states)
        self.end += len(states)


@dataclass(frozen=True)
class _Entries:
    """Entries of one sequence to be written: tokens, hidden states and positions; and whether a draft follows."""

    sequence: Sequence
    page: int
    base: int
    positions: np.ndarray
    tokens: np.ndarray
    states: torch.Tensor
    is_wanted: bool = True


class HeadDraft:
    """Fills ``plan.drafts`` as ``plan.draft_limits`` say, before the step is computed, and notes the hidden states of
    the steps. Drafts are the head's most probable tokens, also of sampled sequences."""

    def __init__(self, session: Session, config: RuntimeConfig) -> None:
        head, model = session.manifest.draft_head, session.manifest.model
        assert head is not None
        self._session, self._page_size = session, config.page_size
        self.width, self._of_all = head.width, head.reads_below(model)
        self._pool = session.allocate_draft_pool(config.num_pages)
        self._waiting: dict[Sequence, _Waiting] = {}

    @property
    def reads_above(self) -> bool:
        """Whether ``note`` takes the states of survivors, which ``upper`` gives, not those of all tokens."""
        return not self._of_all

    def draft(self, plan: Schedule, slots: SlotTable) -> None:
        """Draft for the sequences of ``plan.draft_limits``, whose last token alone is not computed."""
        waiting = self._waiting
        limits = {s: n for s, n in plan.draft_limits.items() if s in waiting and waiting[s].end >= s.num_computed}
        passes = [found for s in limits if (found := self._take(s, s.num_computed, True)) is not None]
        drafts: dict[Sequence, list[int]] = {entries.sequence: [] for entries in passes}
        while passes:
            tokens, hidden = self._run(passes, slots)
            following, rows = list[_Entries](), list[int]()
            for row, (entries, token) in enumerate(zip(passes, tokens, strict=True)):
                sequence = entries.sequence
                if token in sequence.stop_ids:  # nothing comes behind it: left to the model
                    continue
                drafts[sequence].append(token)
                if len(drafts[sequence]) < limits[sequence]:
                    following.append(_behind(entries, token))
                    rows.append(row)
            states = gather(hidden, np.array(rows, dtype=np.int64))
            passes = [replace(each, states=states[row : row + 1]) for row, each in enumerate(following)]
        plan.drafts |= {sequence: tuple(found) for sequence, found in drafts.items() if found}
        plan.draft_limits = {sequence: len(drafts.get(sequence, ())) for sequence in plan.draft_limits}
        plan.decodes, plan.prefills = _with_drafts_as_chunks(plan)

    def note(self, plan: Schedule, batch: StepBatch, states: torch.Tensor, slots: SlotTable) -> None:
        """Note the hidden states of a step, before its tokens are known, and write the entries whose next token is:
        of prompts, and where the plan ``notes_decodes`` of all tokens.

        Args:
            states: [T, H] of all packed tokens, or [R, H] of the survivors where the head ``reads_above``.
        """
        sequences = plan.sequences
        if len(self._waiting) > len(sequences):
            self._waiting = {s: each for s, each in self._waiting.items() if s.status is Status.RUNNING}
        for sequence in sequences:
            if (waiting := self._waiting.get(sequence)) is not None:
                waiting.keep(sequence.num_computed)
        noted = [plan.notes_decodes or s.num_computed < s.num_prompt_tokens for s in sequences]
        if not any(noted):
            return
        starts_of_all = batch.lower.query_start.tolist()
        begins = starts_of_all if self._of_all else batch.survivor_start.tolist()
        states = states.clone()  # sessions may leave every result in the same place
        due = list[_Entries]()
        for row, sequence in enumerate(sequences):
            if not noted[row]:
                continue
            computed, count = sequence.num_computed, begins[row + 1] - begins[row]
            start = computed + starts_of_all[row + 1] - starts_of_all[row] - count
            waiting = self._waiting.get(sequence)
            if waiting is None or waiting.first > computed:
                page, base = (0, 0) if self._of_all else ((start + 1) // self._page_size, start)
                waiting = self._waiting[sequence] = _Waiting(page, base, start, start)
            elif waiting.end < start:
                left = self._take(sequence, waiting.end, False)
                due += [] if left is None else [left]
                waiting.skip(start)
            if not count:
                continue
            waiting.add(states[begins[row] : begins[row + 1]])
            known = sequence.length - 1 - waiting.first
            if count > 1 + len(plan.drafts.get(sequence, ())) or known > MAX_WAITING:
                found = self._take(sequence, min(start + count, sequence.length - 1), False)
                due += [] if found is None else [found]
        if due:
            self._run(due, slots)

    def _take(self, sequence: Sequence, end: int, is_wanted: bool) -> _Entries | None:
        """Take the entries before position ``end``, whose next tokens are known, from those that wait."""
        waiting = self._waiting[sequence]
        count = min(end, waiting.end) - waiting.first
        if count <= 0:
            return None
        states = torch.cat(waiting.states) if len(waiting.states) > 1 else waiting.states[0]
        positions = np.arange(waiting.first, waiting.first + count, dtype=np.int32)
        waiting.first += count
        waiting.states = [states[count:]] if len(states) > count else []
        tokens = sequence.tokens[positions + 1]
        return _Entries(sequence, waiting.page, waiting.base, positions, tokens, states[:count], is_wanted)

    def _run(self, passes: list[_Entries], slots: SlotTable) -> tuple[list[int], torch.Tensor]:
        """Write entries; returns the next token and the hidden state [R, H] of the last one of each sequence of which
        they are wanted, or of the last sequence where that is none."""
        size = self._page_size
        tables, mapping, lengths = list[np.ndarray](), list[np.ndarray](), list[int]()
        for entries in passes:
            table = slots.page_table[entries.sequence.slot, entries.page :]
            places = entries.positions - entries.base
            tables.append(table)
            mapping.append(table[places // size] * size + places % size)
            lengths.append(int(places[-1]) + 1)
        width = -(-max(lengths) // size)
        page_table = np.zeros((len(passes), width), dtype=np.int32)
        for row, (table, length) in enumerate(zip(tables, lengths, strict=True)):
            count = -(-length // size)
            page_table[row, :count] = table[:count]
        wanted = np.array([entries.is_wanted for entries in passes], dtype=np.int64)
        if not wanted.any():
            wanted[-1] = 1
        ends = np.cumsum([len(entries.positions) for entries in passes])
        tokens, hidden = self._session.draft(
            DraftStep(
                _int32(np.concatenate([entries.tokens for entries in passes])),
                torch.cat([entries.states for entries in passes]),
                _int32(np.concatenate([entries.positions for entries in passes])),
                _int32(np.concatenate(mapping)),
                _int32(ends[wanted > 0] - 1),
                starts(wanted),
                _int32(np.array(lengths)),
                torch.from_numpy(page_table),
            ),
            self._pool,
        )
        return tokens.tolist(), hidden


def _behind(entries: _Entries, token: int) -> _Entries:
    """Return the entry behind, of a draft, without its hidden state."""
    return replace(entries, positions=entries.positions[-1:] + 1, tokens=np.array([token], dtype=np.int32))


def _with_drafts_as_chunks(plan: Schedule) -> tuple[list[Sequence], list[tuple[Sequence, int]]]:
    """Return the plan's decodes without those that have drafts, and its chunks with these."""
    drafts: Mapping[Sequence, tuple[int, ...]] = plan.drafts
    moved = [(sequence, 1) for sequence in plan.decodes if sequence in drafts]
    return [sequence for sequence in plan.decodes if sequence not in drafts], plan.prefills + moved


def _int32(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int32))
