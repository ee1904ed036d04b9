"""Drafts by a draft head (``model_defs.draft_head``), before the step that verifies them.

The head has K and V of *entries*: one of a token whose hidden states are known and the token behind it. They are in the
pages of the sequence, in a pool of the head's own, so that sequences share them as they share prefixes. Where the head
reads nothing above the cut, every token has an entry, at its own place, if the plan ``notes_prompts`` and a reused
prefix has entries. Otherwise only survivors do: the entries of a sequence then begin with its first survivor and are
packed into its pages from the one of the token behind that, which no other sequence has. While drafting does not pay,
tokens that are generated get no entries; those of later tokens follow the last ones without a gap, at their true
positions. An entry that is not written, or whose page another sequence has with another next token, costs accuracy of
drafts, never of tokens.
"""

import time
from collections.abc import Iterator, Mapping
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
NOTHING = -1
"""No token."""


@dataclass
class _Waiting:
    """Hidden states of a sequence's newest tokens, whose entries are not written: from position ``first`` on. Those of
    drafts that were not accepted are at its end until the next step."""

    page: int
    """The sequence's page that its entries begin in."""
    base: int
    """What an entry's position is before its place in the pages."""
    is_whole: bool
    """Every token of the prompt has an entry."""
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
        self._has_wrong = False
        """States of drafts that were not accepted may wait."""
        self._written = np.full(config.num_pages * config.page_size, NOTHING, dtype=np.int32)
        """The next token of each entry that is at its token's own place."""

    @property
    def reads_above(self) -> bool:
        """Whether ``note`` takes the states of survivors, which ``upper`` gives, not those of all tokens."""
        return not self._of_all

    def draft(self, plan: Schedule, slots: SlotTable) -> None:
        """Draft for the sequences of ``plan.draft_limits``, whose last token alone is not computed."""
        waiting = self._waiting
        limits = {s: n for s, n in plan.draft_limits.items() if s in waiting and waiting[s].end >= s.num_computed}
        passes = [entries for s in limits for entries in self._take(s, s.num_computed, True)]
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
        of prompts, or of their last tokens, and where the plan ``notes_decodes`` of all tokens.

        Args:
            states: [T, H] of all packed tokens, or [R, H] of the survivors where the head ``reads_above``.
        """
        has_prompts = plan.prefills or any(s.num_computed < s.num_prompt_tokens for s in plan.decodes)
        if not (plan.notes_decodes or has_prompts or self._has_wrong):
            return
        self._has_wrong = bool(plan.drafts)
        if len(self._waiting) > len(plan.sequences):
            self._waiting = {s: each for s, each in self._waiting.items() if s.status is Status.RUNNING}
        found = list(self._noted(plan, batch, slots))
        if not found:
            return
        # A copy, as sessions may leave every result in the same place.
        kept, at, due = gather(states, np.concatenate([rows for _, _, rows in found])), 0, list[_Entries]()
        for sequence, start, rows in found:
            waiting = self._waiting[sequence]
            if waiting.end < start:
                due += self._take(sequence, waiting.end, False)
                waiting.skip(start)
            waiting.add(kept[at : at + len(rows)])
            at += len(rows)
            known = sequence.length - 1 - waiting.first
            if len(rows) > 1 + len(plan.drafts.get(sequence, ())) or known > MAX_WAITING:
                due += self._take(sequence, min(waiting.end, sequence.length - 1), False)
        if due:
            began = time.perf_counter()
            self._run(due, slots)
            plan.note_seconds = time.perf_counter() - began

    def _noted(self, plan: Schedule, batch: StepBatch, slots: SlotTable) -> Iterator[tuple[Sequence, int, np.ndarray]]:
        """Yield the sequences whose hidden states are to be noted, from which position on, and their rows."""
        of_all, of_survivors = batch.lower.query_start.tolist(), batch.survivor_start.tolist()
        ends = of_all if self._of_all else of_survivors
        for row, sequence in enumerate(plan.sequences):
            computed, waiting = sequence.num_computed, self._waiting.get(sequence)
            if waiting is not None and waiting.first > computed:  # it is computed again
                waiting = None
                del self._waiting[sequence]
            if waiting is not None:
                waiting.keep(computed)
            is_prompt, end = computed < sequence.num_prompt_tokens, computed + of_all[row + 1] - of_all[row]
            if not (plan.notes_decodes or is_prompt):
                continue
            is_whole = waiting.is_whole if waiting else self._is_paid(sequence, plan, slots)
            if not (plan.notes_decodes or is_whole or self.reads_above):
                continue
            count = end - computed if is_whole else of_survivors[row + 1] - of_survivors[row]
            if not count:
                continue
            start = end - count
            if waiting is None:
                page, base = (0, 0) if is_whole else ((start + 1) // self._page_size, start)
                self._waiting[sequence] = _Waiting(page, base, is_whole, start, start)
            yield sequence, start, np.arange(ends[row + 1] - count, ends[row + 1])

    def _is_paid(self, sequence: Sequence, plan: Schedule, slots: SlotTable) -> bool:
        """Whether all tokens of a prompt get entries: those computed have theirs, the last one aside, whose next token
        is the sequence's own."""
        if not (self._of_all and plan.notes_prompts):
            return False
        places, size = np.arange(sequence.num_computed - 1), self._page_size
        found = self._written[slots.page_table[sequence.slot, places // size] * size + places % size]
        return bool((found == sequence.tokens[places + 1]).all())

    def _take(self, sequence: Sequence, end: int, is_wanted: bool) -> list[_Entries]:
        """Take the entries before position ``end``, whose next tokens are known, from those that wait, if any."""
        waiting = self._waiting[sequence]
        count = min(end, waiting.end) - waiting.first
        if count <= 0:
            return []
        states = torch.cat(waiting.states) if len(waiting.states) > 1 else waiting.states[0]
        positions = np.arange(waiting.first, waiting.first + count, dtype=np.int32)
        waiting.first += count
        waiting.states = [states[count:].clone()] if len(states) > count else []
        tokens = sequence.tokens[positions + 1]
        return [_Entries(sequence, waiting.page, waiting.base, positions, tokens, states[:count], is_wanted)]

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
            self._written[mapping[-1]] = NOTHING if entries.base else entries.tokens
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
