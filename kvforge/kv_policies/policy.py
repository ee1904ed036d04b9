"""The interface of a KV policy: all that the rest of an engine asks it."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

from kvforge.common.errors import BuildError
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

MAX_PARAMETER = 2**20
"""No parameter may exceed this."""


class Need(Enum):
    """What a policy asks of the rest of an engine; ``compatibility`` derives from it which features go together."""

    ATTENTION_SCORES = "the attention that every key receives"
    ALL_QUERIES = "the attention of every token, those of the prompt among them"
    WHOLE_PROMPT = "all K,V of the prompt at its end"
    WHOLE_PREFILL = "a prefill that runs all layers, to take its place"
    HISTORY_MUTATION = "to change K,V that are already written"
    PER_HEAD_LENGTHS = "another length for each KV head"
    CACHE_PER_LAYER = "K,V of every layer"
    ONE_QUERY = "one query per sequence and step"
    PLAIN_ELEMENTS = "K,V in the model's dtype"
    TOKEN_GROUPS = "groups of tokens that are complete"
    GLOBAL_ATTENTION = "layers that attend to all tokens"
    HALF_BYTES = "two numbers in a byte of the cache"
    TWO_FORMATS = "K and V in formats of their own"
    CACHE_POSITIONS = "keys rotated at their index in the cache"
    ONE_ROTATION = "one rotation of all layers"
    STATIC_SCALES = "scales that are fixed when an engine is built"
    OWN_LAYERS = "layers that all make K,V of their own, of one size"
    INSERTION = "an operator before attention, or in its place"
    OWN_CACHE = "a cache that nothing else changes"
    BFLOAT16 = "--dtype bfloat16"
    PLAIN_WRITES = "graphs that write what they keep without an operator"
    CPU_TARGET = "--target cpu"
    OWN_ENGINE = "an engine of kvforge's own"
    OWN_PREFILL = "prompt tokens that skip layers"


@dataclass(frozen=True)
class OwnerCache:
    """The cache of one owner: pages of ``page_size`` tokens, ``num_kv_heads`` heads of ``head_dim`` numbers for K and
    for V, each number in ``element_bits`` bits, on average over K and V; ``scale_bytes`` a token and head, for K and
    for V, beside them. It is asked by ``num_heads`` heads. Where pages are sealed, numbers of exact ones have
    ``exact_bits``. With one of ``vectors`` a token's K is its V as well."""

    num_kv_heads: int
    head_dim: int
    page_size: int
    element_bits: int
    scale_bytes: int = 0
    num_heads: int = 0
    exact_bits: int = 16
    vectors: int = 2

    @property
    def token_bytes(self) -> int:
        """Bytes of K, V and their scales of one token."""
        return self.num_kv_heads * self.vectors * (self.head_dim * self.element_bits + 8 * self.scale_bytes) // 8

    @property
    def exact_token_bytes(self) -> int:
        """Bytes of K and V of one token in an exact page."""
        return self.vectors * self.num_kv_heads * self.head_dim * self.exact_bits // 8

    @property
    def element_bytes(self) -> int:
        """Bytes of a number, for policies that keep numbers of their own beside the cache: these take whole bytes."""
        return self.element_bits // 8

    def padded(self, num_tokens: int) -> int:
        """Return the tokens in the pages that hold ``num_tokens``."""
        return -(-num_tokens // self.page_size) * self.page_size


@dataclass(frozen=True)
class KVPolicy(ABC):
    """One policy; its fields are its parameters, all integers.

    Everything else asks it, by these methods, about one sequence with ``num_prompt_tokens`` of prompt. What it does not
    override is that of a policy which keeps every token's K,V where it was written. Methods that count are pure numbers
    of their arguments: so what a sequence sees depends on its own tokens alone.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    """As it is written in text."""
    needs: ClassVar[frozenset[Need]] = frozenset()
    slot_columns: ClassVar[tuple[str, ...]] = ()
    """Numbers of a running sequence that ``InputBuilder`` needs."""
    state_inputs: ClassVar[tuple[StateInput, ...]] = ()
    operators: ClassVar[tuple[str, ...]] = ()
    """What ``layer_insertion`` calls before a layer's attention, in this order, and no other graph does."""
    counters: ClassVar[Mapping[str, str]] = {}
    """What it counts, and what that is, in a sentence."""
    rewrites_pages: ClassVar[bool] = False
    """A transition changes the content of the pages that are kept: of those that others hold or may take over, a
    sequence gets copies."""
    seals_pages: ClassVar[bool] = False
    """K and V are written to exact pages, of which there are ``num_exact_pages``. ``layer_insertion`` seals those that
    are full and attends to both."""
    views_pools: ClassVar[bool] = False
    """``layer_insertion`` attends to views of an owner's pools."""
    owners_share: ClassVar[bool] = False
    """What one owner gives up, another may use: K and V of all are in one pool, in which the pages of each owner follow
    those of the owner before."""
    reads_tokens: ClassVar[bool] = False
    """It asks which tokens are special and which are punctuation: an engine's manifest has their ids."""
    texts: ClassVar[tuple[str, ...]] = ()
    """What it asks a model, in words: an engine's manifest has the ids of their tokens."""
    report_columns: ClassVar[tuple[tuple[str, str, int, str], ...]] = ()
    """Columns of ``report`` in a benchmark's table: key, heading, width, format."""

    @classmethod
    def variants(cls) -> tuple[str, ...]:
        """Return what may follow the name behind a ``+``."""
        return ()

    @classmethod
    def variant(cls, name: str) -> "type[KVPolicy]":
        """Return the policy that is this one with what ``variants`` names."""
        raise NotImplementedError

    @property
    def has_transitions(self) -> bool:
        """Whether any sequence's cache may be changed."""
        return type(self).next_transition is not KVPolicy.next_transition

    @property
    def parameters(self) -> dict[str, int]:
        """The parameters by name, in the order they are declared."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        """The policy as ``--kv-policy`` takes it, every parameter named; equal text means an equal policy."""
        given = ",".join(f"{name}={value}" for name, value in self.parameters.items())
        return f"{self.name}:{given}" if given else self.name

    def check_parameters(self, optional: Collection[str] = ()) -> None:
        """Raise BuildError for a parameter below 1, or below 0 where it is ``optional``, or above ``MAX_PARAMETER``."""
        for name, value in self.parameters.items():
            minimum = 0 if name in optional else 1
            if not minimum <= value <= MAX_PARAMETER:
                bound = f"at least {minimum}" if value < minimum else f"at most {MAX_PARAMETER}"
                raise BuildError(f"{self.name}: {name} is {value}; give {bound}.")

    def check_largest(self, name: str, largest: int) -> None:
        """Raise BuildError for a parameter above ``largest``."""
        if self.parameters[name] > largest:
            raise BuildError(f"{self.name}: {name} is {self.parameters[name]}; give at most {largest}.")

    def check(self, num_kv_heads: int, head_dim: int, page_size: int) -> None:  # noqa: B027
        """Raise BuildError unless the parameters suit such heads and pages."""

    # -- bytes of one sequence in one owner, or of one decode step in one layer: callers multiply ------------

    @abstractmethod
    def device_bytes(self, cache: OwnerCache, num_prompt_tokens: int, num_generated_tokens: int = 0) -> int:
        """Return the bytes kept where attention runs, the prompt computed, pages that are not full counted whole."""

    @abstractmethod
    def device_bytes_read(self, cache: OwnerCache, num_prompt_tokens: int, num_generated_tokens: int = 0) -> int:
        """Return the most bytes that a layer reads of device memory for the next token."""

    def prefill_bytes(self, cache: OwnerCache, num_prompt_tokens: int) -> int:
        """Return the bytes beside ``device_bytes`` that a prompt takes where attention runs, until it is computed."""
        return 0

    def host_bytes(self, cache: OwnerCache, num_prompt_tokens: int, num_generated_tokens: int = 0) -> int:
        """Return the bytes kept in the host's memory."""
        return 0

    def host_bytes_read(self, cache: OwnerCache, num_prompt_tokens: int, num_generated_tokens: int = 0) -> int:
        """Return the most bytes that a layer fetches from the host's memory for the next token."""
        return 0

    # -- a sequence's tokens and pages, for the scheduler ----------------------------------------------------

    def next_transition(self, num_prompt_tokens: int, num_computed: int) -> int | None:
        """Return the first number of computed tokens, ``num_computed`` or more, at which the cache is changed before
        another token is computed; None for never. No piece of a step's work goes beyond it, no draft is made of a
        sequence that has one, and pages may be another sequence's only up to the first."""
        return None

    def max_reusable(self, num_prompt_tokens: int) -> int | None:
        """Return of how many of a prompt's first tokens K,V may be another sequence's; None where only the first
        transition says so."""
        return None

    def num_observers(self, num_prompt_tokens: int, start: int, end: int) -> int:
        """Return how many of the last of the tokens from ``start`` to ``end``, no transition between them, go past the
        cut for their attention's sake, though no token follows them."""
        return 0

    def num_probes(self, num_prompt_tokens: int) -> int:
        """Return how many probes of a cache are computed before its first transition, one a step."""
        return 0

    def probe_tokens(self, tokens: Sequence[int], texts: Sequence[Sequence[int]], index: int) -> list[int]:
        """Return the ids of a probe of the cache of ``tokens``: computed behind it, so that the policy sees how they
        attend to it. Nobody keeps their K and V. ``texts`` are the ids of the policy's ``texts``."""
        raise NotImplementedError

    def probe_inputs(self, state_table: Any, num_queries: int, num_scored: int) -> tuple[Any, ...]:
        """Return ``state_inputs`` of a step with ``num_queries`` tokens of a probe. How others attend to the first
        ``num_scored`` tokens of the same cache was seen before. ``state_table`` is int32 ``[1, Ms]``."""
        raise NotImplementedError

    def num_scratch_pages(self, page_size: int) -> int:
        """Return the pages beside all sequences' that K and V of a probe go to, and the state pages beside them."""
        return 0

    def max_piece(self, num_prompt_tokens: int, num_computed: int) -> int | None:
        """Return how many tokens a step may compute after ``num_computed``, besides not going beyond a transition; None
        for any number. What was generated is computed in the same pieces again after a preemption."""
        return None

    def num_cached(self, num_prompt_tokens: int, num_computed: int) -> int:
        """Return the tokens in the pages once so many are computed and the transition there is done. A later token at
        position p goes to the cache index p + num_cached - num_computed."""
        return num_computed

    def max_cached(self, num_prompt_tokens: int, num_tokens: int, start: int = 0) -> int:
        """Return the most tokens that are in the pages while those from ``start`` (its transition done) to
        ``num_tokens`` are computed, before the transition there unless it is ``start``."""
        return num_tokens

    def kept_pages(self, num_prompt_tokens: int, num_computed: int, page_size: int) -> Sequence[int]:
        """Return the indices, ascending, of a sequence's pages that it keeps at a transition; others are given up
        before those of its changed cache are taken. Kept pages may be shared: their content may not change, unless
        ``rewrites_pages``."""
        return range(-(-self.num_cached(num_prompt_tokens, num_computed) // page_size))

    def num_state_pages(self, num_prompt_tokens: int, page_size: int) -> int:
        """Return the pages of the policy's own that a sequence has from its admission until it ends."""
        return 0

    def slot_values(self, num_prompt_tokens: int, num_computed: int) -> tuple[int, ...]:
        """Return the values of ``slot_columns`` while tokens are computed after ``num_computed``, up to the next
        transition."""
        return ()

    def num_exact_pages(self, max_num_seqs: int, max_num_tokens: int, page_size: int) -> int:
        """Return the exact pages of an engine that ``seals_pages``, for so many running sequences and tokens a step."""
        return 0

    # -- memory and graphs -----------------------------------------------------------------------------------

    def state_pools(self, cache: OwnerCache) -> tuple[StatePool, ...]:
        """Return what each owner has beside its K and V pools, those on the host last."""
        return ()

    @property
    def named_pools(self) -> tuple[StatePool, ...]:
        """``state_pools`` of no size in particular: what they are."""
        return self.state_pools(OwnerCache(1, 1, 1, 8))

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

    # -- at run time -----------------------------------------------------------------------------------------

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
