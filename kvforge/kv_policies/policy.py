"""The interface of a KV policy: all that the rest of an engine asks it."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum

from kvforge.common.errors import BuildError
from kvforge.kv_policies.capabilities import (
    NOTHING_INSERTED,
    NOTHING_KEPT,
    NOTHING_ON_HOST,
    HostTier,
    Insertion,
    Keeping,
    Observing,
    Probing,
    Sealing,
)
from kvforge.kv_policies.owner_cache import OwnerCache

MAX_PARAMETER = 2**20
"""No parameter may exceed this."""


class Need(Enum):
    """What a policy asks of the rest of an engine; ``compatibility`` derives from it which features go together."""

    ATTENTION_SCORES = "the attention that every key receives"
    ALL_QUERIES = "the attention of every token, those of the prompt among them"
    TOKEN_SCORES = "scores that a scorer gives tokens as they are written"
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
    UPPER_PAGES = "pages of their own for the layers above a cut"


BASIC_NEEDS = frozenset({Need.OWN_CACHE, Need.OWN_ENGINE})
"""Those of every policy but full attention, to which it adds its own."""


@dataclass(frozen=True)
class KVPolicy(ABC):
    """One policy; its integer fields are its parameters.

    Everything else asks it, by these methods, about one sequence with ``num_prompt_tokens`` of prompt. What it does not
    override is that of a policy which keeps every token's K,V where it was written. Methods that count are pure numbers
    of their arguments: so what a sequence sees depends on its own tokens alone.

    What only some policies have are capabilities. A policy has one by being of its class, or by returning an object of
    it.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """As ``--kv-policy`` takes it."""

    @property
    @abstractmethod
    def title(self) -> str:
        """As it is written in text."""

    @property
    def needs(self) -> frozenset[Need]:
        """What it asks of the rest of an engine."""
        return BASIC_NEEDS

    @property
    def parameters(self) -> dict[str, int]:
        """The parameters by name, in the order they are declared."""
        return {one.name: getattr(self, one.name) for one in dataclasses.fields(self) if one.type is int}

    def __str__(self) -> str:
        """The policy as ``--kv-policy`` takes it, every parameter named; equal text means an equal policy."""
        given = ",".join(f"{name}={value}" for name, value in self.parameters.items())
        return f"{self.name}:{given}" if given else self.name

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
        it ``rewrites_pages``."""
        return range(-(-self.num_cached(num_prompt_tokens, num_computed) // page_size))

    # -- capabilities ------------------------------------------------------------------------------------------

    @property
    def keeping(self) -> Keeping:
        """What it keeps of sequences besides K and V."""
        return self if isinstance(self, Keeping) else NOTHING_KEPT

    @property
    def insertion(self) -> Insertion:
        """What it puts into the graphs."""
        return self if isinstance(self, Insertion) else NOTHING_INSERTED

    @property
    def observing(self) -> Observing | None:
        """Which tokens go past the cut for it."""
        return self if isinstance(self, Observing) else None

    @property
    def probing(self) -> Probing | None:
        """What a prompt's cache is probed by."""
        return self if isinstance(self, Probing) else None

    @property
    def sealing(self) -> Sealing | None:
        """The exact pages of one that seals pages."""
        return self if isinstance(self, Sealing) else None

    @property
    def host_tier(self) -> HostTier:
        """What it keeps in the host's memory."""
        return self if isinstance(self, HostTier) else NOTHING_ON_HOST


def has_transitions(policy: KVPolicy) -> bool:
    """Return whether any sequence's cache may be changed."""
    return type(policy).next_transition is not KVPolicy.next_transition


def check_parameters(policy: KVPolicy, optional: Collection[str] = ()) -> None:
    """Raise BuildError for a parameter below 1, or below 0 where it is ``optional``, or above ``MAX_PARAMETER``."""
    for name, value in policy.parameters.items():
        minimum = 0 if name in optional else 1
        if not minimum <= value <= MAX_PARAMETER:
            bound = f"at least {minimum}" if value < minimum else f"at most {MAX_PARAMETER}"
            raise BuildError(f"{policy.name}: {name} is {value}; give {bound}.")


def check_largest(policy: KVPolicy, name: str, largest: int) -> None:
    """Raise BuildError for a parameter above ``largest``."""
    if policy.parameters[name] > largest:
        raise BuildError(f"{policy.name}: {name} is {policy.parameters[name]}; give at most {largest}.")
