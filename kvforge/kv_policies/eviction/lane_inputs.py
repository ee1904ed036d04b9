"""The step inputs of sequences whose KV heads keep different numbers of tokens."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvforge.kv_policies.state import InputBuilder, SlotTables, StateInput


class CombinedInputs:
    """The inputs of several builders, one after the other, each with what it builds."""

    def __init__(self, parts: Sequence[tuple[InputBuilder, Sequence[StateInput]]]) -> None:
        self._parts = parts

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


class LaneInputs:
    """Builds ``lane_slot``."""

    def __init__(self, max_num_seqs: int) -> None:
        self._slot = torch.zeros(max_num_seqs, dtype=torch.int32)

    def build(self, rows: np.ndarray, slots: SlotTables, num_queries: np.ndarray) -> tuple[Tensor, ...]:
        """See ``InputBuilder``. Views of the buffer."""
        is_cut = slots.cache_offset[rows] < 0
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
