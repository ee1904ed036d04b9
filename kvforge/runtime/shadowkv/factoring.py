"""One prompt that a step factors before it computes anything: numbers, never tensors."""

from dataclasses import dataclass

from kvforge.runtime.sequence import Sequence


@dataclass(frozen=True)
class Factoring:
    """A sequence whose prompt is computed, and the pages that hold the prompt's K,V.

    The sequence does not hold ``prompt_pages`` any more: they may be in its compact cache, or in that of a later
    factoring of the step. So factorings are done in the order in which they were planned, and each reads before it
    writes.
    The compact cache begins in the first of ``sequence.pages``, the rest goes to ``sequence.shadow_pages``.
    """

    sequence: Sequence
    prompt_pages: tuple[int, ...]
