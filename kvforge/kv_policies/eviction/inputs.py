"""The step inputs of sequences whose queries are observed, or whose KV heads keep different numbers of tokens, written
into buffers that are allocated once."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from kvforge.kv_policies.eviction.observation import IS_CUT, LANE_INPUTS, NOTE_INPUTS, OBSERVATION_INPUTS
from kvforge.kv_policies.state import InputBuilder, SlotTables, StateInput


class ObservationInputs:
    """Builds ``Eviction.state_inputs`` from rows of the slot table, without per-row Python work."""

    def __init__(self, page_size: int, max_num_seqs: int, max_state_pages: int) -> None:
        self._page_size = page_size
        self._columns = torch.zeros(2, max_num_seqs, dtype=torch.int32)
        self._table = torch.zeros(max_num_seqs * max_state_pages, dtype=torch.int32)

    def build(self, rows: np.ndarray, slots: SlotTables, num_queries: np.ndarray) -> tuple[Tensor, ...]:
        """Return the inputs of the sequences in ``rows`` [S]; () if none of their queries is observed. Views of the
        buffers."""
        observe_from = slots.columns["observe_from"][rows]
        start = slots.num_computed[rows]
        cached = start + slots.cache_offset[rows]
        is_observed = observe_from < start + num_queries
        if not is_observed.any():
            return ()
        num_seqs = len(rows)
        num_pages = -(-int(((cached + num_queries) * is_observed).max()) // self._page_size)
        observed, scored = (column[:num_seqs] for column in self._columns)
        table = self._table[: num_seqs * num_pages].view(num_seqs, num_pages)
        table.numpy()[:] = np.where(is_observed[:, None], slots.state_table[rows, :num_pages], -1)
        observed.numpy()[:] = np.clip(start + num_queries - observe_from, 0, num_queries)
        scored.numpy()[:] = np.where(start > observe_from, cached, 0)
        return table, observed, scored


class LaneInputs:
    """Builds ``lane_slot``."""

    def __init__(self, max_num_seqs: int) -> None:
        self._slot = torch.zeros(max_num_seqs, dtype=torch.int32)

    def build(self, rows: np.ndarray, slots: SlotTables, num_queries: np.ndarray) -> tuple[Tensor, ...]:
        """See ``InputBuilder``. Views of the buffer."""
        is_cut = slots.columns[IS_CUT][rows] > 0 if IS_CUT in slots.columns else slots.cache_offset[rows] < 0
        if not is_cut.any():
            return ()
        slot = self._slot[: len(rows)]
        slot.numpy()[:] = np.where(is_cut, rows, -1)
        return (slot,)


class NoteInputs:
    """Builds the rows, numbers and places of what is noted of a prompt's last tokens, from ``note_from`` on."""

    def __init__(self, max_num_seqs: int) -> None:
        self._columns = torch.zeros(3, max_num_seqs, dtype=torch.int32)

    def build(self, rows: np.ndarray, slots: SlotTables, num_queries: np.ndarray) -> tuple[Tensor, ...]:
        """See ``InputBuilder``. Views of the buffers."""
        start, first = slots.num_computed[rows], slots.columns["note_from"][rows]
        num_noted = np.where(slots.cache_offset[rows] < 0, 0, np.clip(start + num_queries - first, 0, num_queries))
        if not num_noted.any():
            return ()
        slot, noted, place = (column[: len(rows)] for column in self._columns)
        slot.numpy()[:] = rows
        noted.numpy()[:] = num_noted
        place.numpy()[:] = np.clip(start - first, 0, None)
        return slot, noted, place


class CombinedInputs:
    """The inputs of several builders, one after the other: those that a rule's ``inputs`` name."""

    def __init__(self, inputs: Sequence[StateInput], page_size: int, max_num_seqs: int, max_state_pages: int) -> None:
        every: tuple[tuple[Sequence[StateInput], Callable[[], InputBuilder]], ...] = (
            (OBSERVATION_INPUTS, lambda: ObservationInputs(page_size, max_num_seqs, max_state_pages)),
            (LANE_INPUTS, lambda: LaneInputs(max_num_seqs)),
            (NOTE_INPUTS, lambda: NoteInputs(max_num_seqs)),
        )
        self._parts = [(make(), group) for group, make in every if group[0] in inputs]

    def build(self, rows: np.ndarray, slots: SlotTables, num_queries: np.ndarray) -> tuple[Tensor, ...]:
        """See ``InputBuilder``; neutral ones of builders that have nothing, where another has."""
        built = [(builder.build(rows, slots, num_queries), inputs) for builder, inputs in self._parts]
        if not any(tensors for tensors, _ in built):
            return ()
        return tuple(
            tensor
            for tensors, inputs in built
            for tensor in (tensors or [one.neutral_rows(len(rows)) for one in inputs])
        )
