"""The packed int32 tensors of one step, written into buffers that are allocated once."""

from dataclasses import dataclass

import numpy as np
import torch

from kvforge.runtime.config import RuntimeConfig
from kvforge.runtime.scheduling.schedule import Schedule
from kvforge.runtime.scheduling.slot_table import SlotTable
from kvforge.runtime.sessions.inputs import LowerStep, UpperStep
from kvforge.runtime.step.past_cut import PastCut, planned_past_cut


@dataclass(frozen=True)
class StepBatch:
    """A step, and which of its T tokens go past the cut.

    Tensors of a builder are views of its buffers: valid until the next batch is built.
    """

    lower: LowerStep
    survivor_index: torch.Tensor
    """[R] as ``UpperStep``'s"""
    survivor_start: torch.Tensor
    """[S+1]"""
    logit_rows: torch.Tensor | None = None
    """Which of the survivors' logits are asked for, as the others only go past the cut to be observed; None: all."""
    past_cut: PastCut | None = None
    """What goes past a blind cut; None with any other."""
    reads_states: bool = False
    """Whether layers above the cut read states; each survivor then has a row."""

    def upper(self, hidden: torch.Tensor) -> UpperStep:
        """Return what follows; ``hidden`` is ``lower``'s result."""
        step, above = self.lower, self.past_cut
        if above is not None:
            tokens = hidden, above.survivor_index, above.survivor_start, step.positions
            more = above.kv_length, above.page_table, step.state, above.slots, above.logit_index
            return UpperStep(*tokens, *more)
        rows = step.rows[1].index_select(0, self.survivor_index) if self.reads_states else None
        assert rows is None or bool((rows >= 0).all()), "a survivor has no state"
        return UpperStep(
            hidden,
            self.survivor_index,
            self.survivor_start,
            step.positions,
            step.kv_length,
            step.page_table,
            step.state,
            survivor_state=rows,
        )

    @property
    def num_survivors(self) -> int:
        """R"""
        return self.survivor_index.shape[0]


class _Buffer:
    """A flat int32 tensor and its numpy view."""

    def __init__(self, size: int) -> None:
        self.tensor = torch.zeros(size, dtype=torch.int32)
        self.array = self.tensor.numpy()


class StepBatchBuilder:
    """Builds a ``StepBatch`` from a schedule; decode rows are filled without per-row Python work."""

    def __init__(self, config: RuntimeConfig) -> None:
        self._page_size, self._visibility = config.page_size, config.visibility
        self._observing = config.kv_policy.observing if config.has_observers else None
        tokens, seqs = config.max_num_tokens, config.max_num_seqs
        self._input_ids, self._positions = _Buffer(tokens), _Buffer(tokens)
        self._slot_mapping = _Buffer(tokens)
        self._survivor_index = _Buffer(config.max_num_survivors)
        self._query_start, self._survivor_start = _Buffer(seqs + 1), _Buffer(seqs + 1)
        self._kv_length = _Buffer(seqs)
        self._has_rows, self._reads_states = config.num_state_rows > 0, config.reads_states
        self._state_read, self._state_write = _Buffer(seqs), _Buffer(tokens)
        self._page_table = _Buffer(seqs * config.max_pages_per_seq)
        self._state = config.kv_policy.keeping.make_input_builder(
            config.page_size, seqs, config.max_state_pages_per_seq
        )
        self._arange = np.arange(max(tokens, seqs + 1, config.max_seq_len) + 1, dtype=np.int32)

    def build(self, plan: Schedule, slots: SlotTable) -> StepBatch:
        """Fill the buffers for ``plan``; sequences are the plan's decodes, then its chunks."""
        num_decodes, num_seqs = len(plan.decodes), len(plan.decodes) + len(plan.prefills)
        rows = np.fromiter((s.slot for s in plan.sequences), dtype=np.intp, count=num_seqs)
        arange, query_start, kv_length = self._arange, self._query_start.array, self._kv_length.array
        survivor_index, survivor_start = self._survivor_index.array, self._survivor_start.array

        decode_rows = rows[:num_decodes]
        positions = slots.num_computed[decode_rows]
        cached = positions + slots.cache_offset[decode_rows]
        self._write_tokens(
            0,
            positions,
            slots.next_token[decode_rows],
            cached,
            slots.write_table[decode_rows, cached // self._page_size],
        )
        query_start[: num_decodes + 1] = arange[: num_decodes + 1]
        survivor_start[: num_decodes + 1] = arange[: num_decodes + 1]
        survivor_index[:num_decodes] = arange[:num_decodes]
        kv_length[:num_decodes] = cached + 1

        num_tokens, num_survivors = num_decodes, num_decodes
        logit_rows = list(range(num_decodes))
        for row, (sequence, count) in enumerate(plan.prefills, start=num_decodes):
            drafts = plan.drafts.get(sequence, ())
            start, end = sequence.num_computed, sequence.num_computed + count
            positions = arange[start : end + len(drafts)]
            ids = sequence.tokens[start:end]
            cached = positions + sequence.cache_offset if sequence.cache_offset else positions
            self._write_tokens(
                num_tokens,
                positions,
                np.append(ids, np.asarray(drafts, dtype=np.int32)) if drafts else ids,
                cached,
                slots.write_table[sequence.slot, cached // self._page_size],
            )
            num_tokens += len(positions)
            kept = asked = 1 + len(drafts) if end == sequence.length else 0
            if self._observing is not None:
                kept = max(kept, self._observing.num_observers(sequence.num_prompt_tokens, start, end))
                logit_rows += range(num_survivors + kept - asked, num_survivors + kept)
            if kept:
                survivor_index[num_survivors : num_survivors + kept] = arange[num_tokens - kept : num_tokens]
                num_survivors += kept
            kv_length[row] = end + len(drafts) + sequence.cache_offset
            query_start[row + 1] = num_tokens
            survivor_start[row + 1] = num_survivors

        num_pages = -(-int(kv_length[:num_seqs].max()) // self._page_size)
        table = self._page_table.array[: num_seqs * num_pages].reshape(num_seqs, num_pages)
        table[:] = slots.page_table[rows, :num_pages]
        step = LowerStep(
            input_ids=self._input_ids.tensor[:num_tokens],
            positions=self._positions.tensor[:num_tokens],
            slot_mapping=self._slot_mapping.tensor[:num_tokens],
            query_start=self._query_start.tensor[: num_seqs + 1],
            kv_length=self._kv_length.tensor[:num_seqs],
            page_table=self._page_table.tensor[: num_seqs * num_pages].view(num_seqs, num_pages),
            state=self._state.build(rows, slots, np.diff(query_start[: num_seqs + 1])),
            rows=self._state_rows(plan, slots, rows, num_tokens) if self._has_rows else (),
        )
        if self._visibility is not None:
            above = planned_past_cut(plan, slots, self._visibility, self._page_size)
            return StepBatch(step, above.survivor_index, above.survivor_start, past_cut=above)
        survivors, starts = self._survivor_index.tensor[:num_survivors], self._survivor_start.tensor[: num_seqs + 1]
        is_observed = self._observing is not None and len(logit_rows) < num_survivors
        observed_apart = torch.tensor(logit_rows) if is_observed else None
        return StepBatch(step, survivors, starts, observed_apart, reads_states=self._reads_states)

    def _state_rows(
        self, plan: Schedule, slots: SlotTable, rows: np.ndarray, num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Fill in which rows of states the S sequences go on from, and where those behind the tokens go."""
        read, write, starts = self._state_read, self._state_write, self._query_start.array
        read.array[: len(rows)] = slots.state_read[rows]
        write.array[:num_tokens] = -1
        counts = np.array([1] * len(plan.decodes) + [count for _, count in plan.prefills])
        write.array[starts[: len(rows)] + counts - 1] = slots.state_write[rows]
        for index, (sequence, _) in enumerate(plan.prefills, start=len(plan.decodes)):
            for place, row in plan.state_writes.get(sequence, {}).items():
                if place < starts[index + 1] - starts[index]:  # fewer drafts were made than there was room for
                    write.array[starts[index] + place] = row
        return read.tensor[: len(rows)], write.tensor[:num_tokens]

    def _write_tokens(
        self, start: int, positions: np.ndarray, ids: np.ndarray, cached: np.ndarray, pages: np.ndarray
    ) -> None:
        end = start + len(positions)
        self._input_ids.array[start:end] = ids
        self._positions.array[start:end] = positions
        self._slot_mapping.array[start:end] = pages * self._page_size + cached % self._page_size
