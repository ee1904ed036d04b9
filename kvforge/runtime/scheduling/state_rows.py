"""Who has which state of a layer: numbers, never tensors."""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

import numpy as np

from kvforge.runtime.config import RuntimeConfig
from kvforge.runtime.requests.sequence import Sequence
from kvforge.runtime.scheduling.prefix_cache import PrefixCache
from kvforge.runtime.scheduling.schedule import Schedule
from kvforge.runtime.scheduling.slot_table import SlotTable


class StateRows:
    """Of all rows num_state_rows hold states of running sequences and num_snapshots snapshots; any row may be either.
    None where layers keep none.

    A running sequence owns one row, which its steps write, and one more for each draft until it is known which are
    accepted. A *snapshot* is the state behind a published page: who takes over that page as the last one of its prefix
    reads it and writes a row of its own, so nothing is copied. A snapshot lives as long as its page is published, or
    until another one needs its row: of those that no sequence reads, the least recently used one goes.
    """

    def __init__(self, config: RuntimeConfig, slots: SlotTable, cache: PrefixCache) -> None:
        self._page_size, self._every, self._slots, self._cache = config.page_size, config.snapshot_every, slots, cache
        self.num_rows, self.num_snapshots = config.num_state_rows, config.num_snapshots
        self.is_used = self.num_rows > 0
        total = self.num_rows + self.num_snapshots
        self.free_rows = list(range(self.num_rows - 1, -1, -1))
        self.free_snapshots = list(range(total - 1, self.num_rows - 1, -1))
        self.owned: dict[Sequence, int] = {}
        self.drafts: dict[Sequence, list[int]] = {}
        """Of sequences whose drafts are being verified, the rows behind the next ones."""
        self.planned: dict[Sequence, dict[int, int]] = {}
        """Snapshots that the step writes: their rows, by the number of tokens that they hold."""
        self.read: dict[Sequence, int] = {}
        """Of running sequences that go on from a snapshot, its row."""
        self.num_readers: Counter[int] = Counter()
        self.snapshots: dict[int, int] = {}
        """Rows by page, the least recently used first."""
        if self.is_used:
            cache.on_forget = self._forgotten

    @property
    def num_used(self) -> int:
        """Rows of running sequences."""
        return self.num_rows - len(self.free_rows)

    def reach(self, pages: SequenceOf[int]) -> int:
        """Return how many of a prefix's pages a sequence may take over: all of them, or up to the last snapshot."""
        if not self.is_used:
            return len(pages)
        return next((count for count in range(len(pages), 0, -1) if pages[count - 1] in self.snapshots), 0)

    def wants(self, sequence: Sequence, index: int) -> bool:
        """Whether the state behind the sequence's page ``index`` is to be kept: that of each N-th page, and of the last
        one that an equal prompt may take over."""
        if not self.num_snapshots:
            return False
        return (index + 1) % self._every == 0 or index + 1 == (sequence.num_prompt_tokens - 1) // self._page_size

    def take(self, sequence: Sequence) -> None:
        """Give a sequence that has just got its slot a row, which must be there, and the snapshot behind its pages."""
        if not self.is_used:
            return
        row = self._slots.state_write[sequence.slot] = self.owned[sequence] = self.free_rows.pop()
        self._slots.state_read[sequence.slot] = -1
        if sequence.pages:
            page = sequence.pages[-1]
            row = self.snapshots.pop(page)
            self.snapshots[page] = row
            self._slots.state_read[sequence.slot] = row
            self._pin(sequence, row)

    def take_drafts(self, sequence: Sequence, count: int) -> None:
        """Give a sequence rows, which must be free, for as many drafts as the step being planned computes of it."""
        if self.is_used:
            self.drafts[sequence] = [self.free_rows.pop() for _ in range(count)]

    def plan(self, plan: Schedule) -> None:
        """Say where the states of a step go, once nothing else changes it."""
        if self.num_snapshots and plan.decodes:
            ends = self._slots.num_computed[[sequence.slot for sequence in plan.decodes]] + 1
            for row in np.flatnonzero(ends % self._page_size == 0):
                self.plan_tokens(plan.decodes[row], 1)
        for sequence in plan.decodes if plan.draft_limits else ():
            if sequence in plan.draft_limits:
                plan.state_writes[sequence] = self.plan_tokens(sequence, 1)
        for sequence, count in plan.prefills:
            plan.state_writes[sequence] = self.plan_tokens(sequence, count)

    def plan_tokens(self, sequence: Sequence, num_tokens: int) -> dict[int, int]:
        """Return the rows of those of a sequence's next tokens and drafts whose states are kept, by the token's place
        in the step; that of the last token alone is in ``state_write`` instead. Deepest snapshots come first."""
        if not self.is_used:
            return {}
        start, drafts, page_size = sequence.num_computed, self.drafts.get(sequence), self._page_size
        # With drafts the row of the last token is the sequence's own, as the next one may be the draft's.
        end, planned = start + num_tokens, dict[int, int]()
        for index in range((end - (drafts is not None)) // page_size - 1, start // page_size - 1, -1):
            if self.wants(sequence, index) and self._cache.page_of(sequence, index) not in self.snapshots:
                row = self._new_snapshot()
                if row is None:
                    break
                planned[(index + 1) * page_size] = row
        if planned:
            self.planned[sequence] = planned
            self._slots.state_write[sequence.slot] = planned.get(end, self.owned[sequence])
        writes = {border - start - 1: row for border, row in planned.items() if border < end}
        return writes | {num_tokens + place: row for place, row in enumerate(drafts or ())}

    def commit(self, sequences: SequenceOf[Sequence]) -> None:
        """Record that a step has computed the planned tokens of these, once their pages are published."""
        if not self.is_used:
            return
        slots, rows = self._slots, [sequence.slot for sequence in sequences]
        slots.state_read[rows] = slots.state_write[rows]
        for sequence, row in list(self.read.items()):
            if slots.state_read[sequence.slot] != row:
                self._unpin(sequence)
        for sequence in [sequence for sequence in sequences if sequence in self.planned]:
            last, owned = int(slots.state_read[sequence.slot]), self.owned[sequence]
            if last != owned:
                self._pin(sequence, last)
            slots.state_write[sequence.slot] = owned
            planned = self.planned.pop(sequence)
            for border in sorted(planned):
                page = self._cache.page_of(sequence, border // self._page_size - 1)
                if page is not None and page not in self.snapshots:
                    self.snapshots[page] = planned[border]
                else:
                    self._free_unless_read(planned[border])

    def accept(self, sequences: Iterable[Sequence]) -> None:
        """Record that the next draft of each became a token: the state behind it is the sequence's own."""
        if not self.is_used:
            return
        for sequence in sequences:
            if not self._keep(sequence, sequence.num_computed - 1):
                self.free_rows.append(self.owned[sequence])
            row = self.owned[sequence] = self.drafts[sequence].pop(0)
            self._slots.state_read[sequence.slot] = self._slots.state_write[sequence.slot] = row

    def trim(self, sequence: Sequence) -> None:
        """Take back the rows of drafts that were not accepted."""
        if (rows := self.drafts.pop(sequence, None)) is not None:
            self.free_rows += rows
            last = self.owned[sequence]
            if self._keep(sequence, sequence.num_computed):
                self._pin(sequence, last)
                self.owned[sequence] = self._slots.state_write[sequence.slot] = self.free_rows.pop()

    def give_back(self, sequence: Sequence) -> None:
        """Take all rows of a sequence that still has its slot."""
        if sequence not in self.owned:
            return
        self.free_rows += [self.owned.pop(sequence), *self.drafts.pop(sequence, ())]
        self.free_snapshots += self.planned.pop(sequence, {}).values()
        self._unpin(sequence)

    def _keep(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make the row that a sequence owns, with the state behind so many tokens, a snapshot where one is wanted; a
        free row takes its place among those of running sequences."""
        index, offset = divmod(num_tokens, self._page_size)
        page = None if offset or not self.wants(sequence, index - 1) else self._cache.page_of(sequence, index - 1)
        if page is None or page in self.snapshots or (row := self._new_snapshot()) is None:
            return False
        self.snapshots[page] = self.owned[sequence]
        self.free_rows.append(row)
        return True

    def _new_snapshot(self) -> int | None:
        if self.free_snapshots:
            return self.free_snapshots.pop()
        page = next((page for page, row in self.snapshots.items() if not self.num_readers[row]), None)
        return None if page is None else self.snapshots.pop(page)

    def _forgotten(self, page: int) -> None:
        """Let go of the snapshot behind a page that is not published any more."""
        if (row := self.snapshots.pop(page, None)) is not None:
            self._free_unless_read(row)

    def _pin(self, sequence: Sequence, row: int) -> None:
        self.read[sequence] = row
        self.num_readers[row] += 1

    def _unpin(self, sequence: Sequence) -> None:
        if (row := self.read.pop(sequence, None)) is not None:
            self.num_readers[row] -= 1
            if row not in self.snapshots.values():
                self._free_unless_read(row)

    def _free_unless_read(self, row: int) -> None:
        """Free the row of no page, now or when its last reader goes on."""
        if not self.num_readers[row]:
            self.free_snapshots.append(row)
