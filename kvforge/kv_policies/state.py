"""What a policy keeps of sequences besides K and V: pools, inputs of the graphs, and the code that changes them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from kvforge.kv_policies.transition import CachedSequence, Transition

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


@dataclass(frozen=True)
class StatePool:
    """A tensor of one owner beside its K and V pools: ``shape`` for each state page, for each running sequence, or for
    each page of the ``cache``, as a part of its ``page_bytes``: where pages are sealed, these are K and V.

    ``dtype`` is torch's and numpy's, "" that of K and V. One ``on_host`` is in main memory, mapped for the device.
    All elements are ``initial`` before the first step.
    """

    name: str
    rows: Literal["pages", "sequences", "cache"]
    shape: tuple[int, ...]
    dtype: str = ""
    on_host: bool = False
    initial: int = 0


@dataclass(frozen=True)
class StateInput:
    """An int32 input of the graphs behind the pools: ``[S]``, or ``[S, Ms]`` for a table of state pages. One
    ``by_pages`` is ``[S, M]``, as the page table is.

    Rows of sequences that have no state are ``neutral``: with them the graphs do nothing that is the policy's.
    """

    name: str
    is_table: bool = False
    neutral: int = 0
    by_pages: bool = False

    def shape(self, num_seqs: int, num_columns: int) -> tuple[int, ...]:
        """Return the shape for so many sequences, and columns where it is a table."""
        return (num_seqs, num_columns) if self.is_table else (num_seqs,)

    def neutral_rows(self, num_seqs: int, num_columns: int = 1) -> "Tensor":
        """Return the input of sequences that have no state."""
        import torch

        return torch.full(self.shape(num_seqs, num_columns), self.neutral, dtype=torch.int32)


class SlotTables(Protocol):
    """What is known of running sequences, a row for each slot (int32)."""

    state_table: "np.ndarray"
    """[num_slots, max_state_pages] entries past a sequence's pages are stale."""

    write_table: "np.ndarray"
    """[num_slots, max_pages] the page that each logical page's K,V are written to; stale where a step writes none."""

    num_computed: "np.ndarray"
    """[num_slots] tokens whose K,V are written."""
    cache_offset: "np.ndarray"
    """[num_slots] where a token is in the cache, less its position."""

    @property
    def columns(self) -> "Mapping[str, np.ndarray]":
        """By each of the policy's ``slot_columns``, [num_slots]."""


class InputBuilder(Protocol):
    """Makes a step's values of the policy's inputs."""

    def build(self, rows: "np.ndarray", slots: SlotTables, num_queries: "np.ndarray") -> "tuple[Tensor, ...]":
        """Return the inputs of the sequences in ``rows`` [S], in their order, of which a step computes ``num_queries``
        [S] tokens; () where all would be neutral. They are valid until the next call."""


class NoInputs:
    """Of policies whose graphs take nothing more."""

    def build(self, rows: "np.ndarray", slots: SlotTables, num_queries: "np.ndarray") -> "tuple[Tensor, ...]":
        return ()


class PolicyState(Protocol):
    """A policy's hand on the pools."""

    def apply(self, transitions: Sequence[Transition]) -> None:
        """Change the cache of sequences, in this order: see ``Transition`` for why it matters."""

    def counters(self) -> dict[str, int]:
        """Return the policy's ``counters`` since the engine was loaded. May wait for the device: not for every step."""


class MeasuringState(PolicyState, Protocol):
    """That of a policy that has ``keeps_by_content``."""

    def measure(self, sequence: CachedSequence) -> Sequence[int]:
        """Return the indices, ascending, of the pages that a transition of ``sequence`` keeps, which is about to take
        place. Pages that it gives up were full."""


class NoState:
    """Of policies that move pages and nothing in them."""

    def apply(self, transitions: Sequence[Transition]) -> None:
        """Nothing."""

    def counters(self) -> dict[str, int]:
        return {}


@dataclass(frozen=True)
class EngineMemory:
    """What an engine gives a policy's ``PolicyState``: every owner's pool in ascending order, each (k_pool, v_pool,
    then the policy's), the static scales of its K and V, cos and sin of every position, which only engines have
    whose graphs need them, and the ids of special and of punctuation tokens for a policy that ``reads_tokens``."""

    pools: "Sequence[tuple[Tensor, ...]]"
    kv_scales: Sequence[tuple[float, float]]
    rope_tables: "Callable[[], tuple[Tensor, Tensor]]"
    max_seq_len: int
    special_tokens: Sequence[int] = ()
    punctuation_tokens: Sequence[int] = ()


LayerCheck = Callable[[list[Any], Any, dict[str, str]], "tuple[Any, str] | None"]
"""Called with the nodes of the policy's operators before a layer's attention, the node of that attention and its
owner's placeholders by role: returns the node that breaks a rule and the rule, None where all is well."""
