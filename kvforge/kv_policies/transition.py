"""What a step does to a sequence's cache before it computes anything: numbers, never tensors."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np


class CachedSequence(Protocol):
    """What a policy knows of a running sequence."""

    tokens: "np.ndarray"
    """int32, at least ``num_computed`` ids."""
    num_prompt_tokens: int
    num_computed: int
    slot: int
    """Its row of the tables of running sequences, and of state pools that have a row per sequence."""
    pages: list[int]
    state_pages: list[int]


@dataclass(frozen=True)
class Transition:
    """A sequence that has computed as many tokens as ``KVPolicy.next_transition`` named, and the pages that it had.

    ``sequence.pages`` are those of the changed cache. The sequence does not hold those of ``old_pages`` that it gave
    up: they may be among its new ones, or among those of a later transition of the step. So transitions are done in the
    order in which they were planned, and each reads before it writes.
    """

    sequence: CachedSequence
    old_pages: tuple[int, ...]
