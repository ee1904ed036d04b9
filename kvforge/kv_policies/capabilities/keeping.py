"""What a policy keeps of sequences besides K and V: pools, inputs of the graphs, and the code that changes them."""

from collections.abc import Mapping
from typing import ClassVar

from kvforge.kv_policies.owner_cache import OwnerCache
from kvforge.kv_policies.state import (
    EngineMemory,
    InputBuilder,
    NoInputs,
    NoState,
    PolicyState,
    StateInput,
    StatePool,
)


class Keeping:
    """As it stands, that of a policy which keeps nothing."""

    rewrites_pages: ClassVar[bool] = False
    """A transition changes the content of the pages that are kept: of those that others hold or may take over, a
    sequence gets copies."""
    reads_tokens: ClassVar[bool] = False
    """It asks which tokens are special and which are punctuation: an engine's manifest has their ids."""
    counters: ClassVar[Mapping[str, str]] = {}
    """What it counts, and what that is, in a sentence."""
    report_columns: ClassVar[tuple[tuple[str, str, int, str], ...]] = ()
    """Columns of ``report`` in a benchmark's table: key, heading, width, format."""

    @property
    def state_inputs(self) -> tuple[StateInput, ...]:
        """What the graphs take of it."""
        return ()

    @property
    def slot_columns(self) -> tuple[str, ...]:
        """Numbers of a running sequence that ``InputBuilder`` needs."""
        return ()

    def num_state_pages(self, num_prompt_tokens: int, page_size: int) -> int:
        """Return the pages of the policy's own that a sequence has from its admission until it ends."""
        return 0

    def slot_values(self, num_prompt_tokens: int, num_computed: int) -> tuple[int, ...]:
        """Return the values of ``slot_columns`` while tokens are computed after ``num_computed``, up to the next
        transition."""
        return ()

    def state_pools(self, cache: OwnerCache) -> tuple[StatePool, ...]:
        """Return what each owner has beside its K and V pools, those on the host last."""
        return ()

    @property
    def named_pools(self) -> tuple[StatePool, ...]:
        """``state_pools`` of no size in particular: what they are."""
        return self.state_pools(OwnerCache(1, 1, 1, 8))

    def make_input_builder(self, page_size: int, max_num_seqs: int, max_state_pages: int) -> InputBuilder:
        """Return what makes ``state_inputs`` of up to ``max_num_seqs`` sequences of up to ``max_state_pages`` each."""
        return NoInputs()

    def make_state(self, memory: EngineMemory) -> PolicyState:
        """Return what carries out transitions in an engine's pools.

        Raises:
            EngineError: the engine lacks what the policy needs.
        """
        return NoState()

    def report(self, counters: Mapping[str, int]) -> dict[str, float]:
        """Return what a benchmark shows of what was counted."""
        return {}


NOTHING_KEPT = Keeping()
