"""What the graphs ``lower`` and ``upper`` take of a step, in their order.

T packed tokens of S sequences, R of them survivors, M pages a sequence; int32 on the CPU, but for ``hidden``.
"""

from typing import NamedTuple

from torch import Tensor

from kvforge.runtime.shadow_inputs import ShadowTensors, not_factored


class LowerStep(NamedTuple):
    """A step's tokens; all are computed up to the cut."""

    input_ids: Tensor
    """[T]"""
    positions: Tensor
    """[T]"""
    slot_mapping: Tensor
    """[T] page * page_size + offset; of a factored sequence, in its compact cache"""
    query_start: Tensor
    """[S+1]"""
    kv_length: Tensor
    """[S] K,V length after this step: that of the compact cache where the prompt is factored"""
    page_table: Tensor
    """[S, M]"""
    shadow: ShadowTensors = ()
    """Of the factored sequences, behind the pools; () if there are none."""

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """What the graph takes before the pools."""
        return self[:-1]


class UpperStep(NamedTuple):
    """The rows that go past the cut: of each sequence its last tokens, in order."""

    hidden: Tensor
    """[T, hidden_size] ``lower``'s, on the session's device"""
    survivor_index: Tensor
    """[R] rows of ``hidden``"""
    survivor_start: Tensor
    """[S+1]"""
    positions: Tensor
    """[T]"""
    kv_length: Tensor
    """[S] as ``LowerStep``'s"""
    page_table: Tensor
    """[S, M]"""
    shadow: ShadowTensors = ()
    """As ``LowerStep``'s."""

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """What the graph takes before the pools."""
        return self[:-1]


def shadow_of(step: LowerStep | UpperStep) -> ShadowTensors:
    """Return what a graph that selects chunks takes behind the pools."""
    return step.shadow or not_factored(step.kv_length.shape[0])
