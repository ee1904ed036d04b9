"""What only some KV policies have: each class is a capability, which ``KVPolicy`` names and any policy may have."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from kvforge.kv_policies.owner_cache import OwnerCache
from kvforge.kv_policies.state import (
    EngineMemory,
    InputBuilder,
    LayerCheck,
    NoInputs,
    NoState,
    PolicyState,
    StateInput,
    StatePool,
)


class Keeping:
    """What a policy keeps of sequences besides K and V: pools, inputs of the graphs, and the code that changes them. As
    it stands, nothing."""

    rewrites_pages: ClassVar[bool] = False
    """A transition changes the content of the pages that are kept: of those that others hold or may take over, a
    sequence gets copies."""
    keeps_by_content: ClassVar[bool] = False
    """Which pages a transition keeps is decided by what is in them: its ``make_state`` gives a ``MeasuringState``. What
    the policy says of lengths is then the most that there can be."""
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

    def slot_values(self, num_prompt_tokens: int, num_computed: int) -> tuple[int, ...]:
        """Return the values of ``slot_columns`` while tokens are computed after ``num_computed``, up to the next
        transition."""
        return ()

    def num_state_pages(self, num_prompt_tokens: int, page_size: int) -> int:
        """Return the pages of the policy's own that a sequence has from its admission until it ends."""
        return 0

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


class Insertion:
    """What a policy puts into the graphs. As it stands, nothing: layers attend as the model's own."""

    views_pools: ClassVar[bool] = False
    """``layer_insertion`` attends to views of an owner's pools."""
    owners_share: ClassVar[bool] = False
    """What one owner gives up, another may use: K and V of all are in one pool, in which the pages of each owner follow
    those of the owner before."""

    @property
    def operators(self) -> tuple[str, ...]:
        """What ``layer_insertion`` calls before a layer's attention, in this order, and no other graph does."""
        return ()

    def layer_insertion(self) -> Any:
        """Return what layers call between a layer's rotated queries and its attention, a
        ``model_defs.cache_insertion.CacheInsertion``, or None."""
        return None

    def layer_check(self) -> LayerCheck | None:
        """Return the check of an exported layer that ``layer_insertion`` is in, None where there is none."""
        return None

    def activation_bytes(self, num_heads: int, num_kv_heads: int, max_seq_len: int) -> int:
        """Return the most bytes that ``layer_insertion`` holds of a sequence while a layer runs."""
        return 0


class HostTier:
    """What a policy keeps in the host's memory, in bytes as those of ``KVPolicy``. As it stands, nothing."""

    def host_bytes(self, cache: OwnerCache, num_prompt_tokens: int, num_generated_tokens: int = 0) -> int:
        """Return the bytes kept there."""
        return 0

    def host_bytes_read(self, cache: OwnerCache, num_prompt_tokens: int, num_generated_tokens: int = 0) -> int:
        """Return the most bytes that a layer fetches from there for the next token."""
        return 0


class Observing(ABC):
    """A policy that looks at attention above the cut, where prompt tokens do not come otherwise."""

    @abstractmethod
    def num_observers(self, num_prompt_tokens: int, start: int, end: int) -> int:
        """Return how many of the last of the tokens from ``start`` to ``end``, no transition between them, go past the
        cut though no token follows them."""


class Probing(ABC):
    """Probes of a prompt's cache, computed behind it, one a step, before its first transition, so that the policy sees
    how they attend to it. Nobody keeps their K and V."""

    texts: ClassVar[tuple[str, ...]]
    """What the model is asked, in words: an engine's manifest has the ids of their tokens."""

    @abstractmethod
    def num_probes(self, num_prompt_tokens: int) -> int:
        """Return how many probes a prompt has."""

    @abstractmethod
    def tokens(self, tokens: Sequence[int], texts: Sequence[Sequence[int]], index: int) -> list[int]:
        """Return the ids of probe ``index`` of the cache of ``tokens``; ``texts`` are the ids of its ``texts``."""

    @abstractmethod
    def inputs(self, state_table: Any, num_queries: int, num_scored: int) -> tuple[Any, ...]:
        """Return ``state_inputs`` of a step with ``num_queries`` tokens of a probe. How others attend to the first
        ``num_scored`` tokens of the cache was seen before. ``state_table`` is int32 ``[1, Ms]``."""

    @abstractmethod
    def num_scratch_pages(self, page_size: int) -> int:
        """Return the pages beside all sequences' that K and V of a probe go to, and the state pages beside them."""


class Sealing:
    """K and V are written to exact pages. The policy's insertion seals those that are full, and attends to both."""

    def num_exact_pages(self, max_num_seqs: int, max_num_tokens: int, page_size: int) -> int:
        """Return the exact pages for so many running sequences and tokens a step: T tokens touch at most
        T / page_size pages and two more of each of their sequences; a sequence that is not in a step has one."""
        return 2 * max_num_seqs + -(-max_num_tokens // page_size)


class Wrapping(ABC):
    """A policy around another one, called with the other's class and the parameters of both. ``--kv-policy`` has the
    other's name, ``+`` and ``wrapper_name``."""

    wrapper_name: ClassVar[str]

    @classmethod
    @abstractmethod
    def can_wrap(cls, policy: type) -> bool:
        """Return whether it goes around policies of this class."""


NOTHING_KEPT, NOTHING_INSERTED, NOTHING_ON_HOST = Keeping(), Insertion(), HostTier()
