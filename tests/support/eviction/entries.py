"""What the oracle of eviction keeps of a sequence, and what it tells of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor


class Look(NamedTuple):
    """One reading layer's query at position ``query`` saw ``num_slots`` entries and gave one of them ``weight``: the
    mean over the query heads of the entry's KV head."""

    query: int
    weight: float
    num_slots: int


@dataclass
class Entry:
    """One token in one lane: ``raw_key`` is not rotated, ``key`` and ``value`` are what attention reads; each float64
    ``[head_dim]``."""

    position: int
    raw_key: Tensor
    key: Tensor
    value: Tensor
    looks: list[Look] = field(default_factory=list)
    probed: float = 0.0
    """The largest weight that a head gave in a probe."""
    predicted: float = 0.0
    """What a scorer says of the token."""
    queries: Tensor | None = None
    """The token's own queries ``[group, head_dim]`` in the layer that owns the cache, not rotated."""


Lane = list[Entry]
"""The entries of one owner and KV head, by position."""


@dataclass(frozen=True)
class Moment:
    """An eviction: ``computed`` tokens are, the eviction before took place at ``previous`` (0: there was none)."""

    computed: int
    previous: int
    num_prompt: int
    budget: int
    parameters: Mapping[str, int]
    page_size: int = 1
    """Matters to rules whose heads take whole pages."""
    cosines: Mapping[int, Mapping[int, float]] = field(default_factory=dict)
    """By owner and position, of the hidden state before the owner's attention with that behind it."""
    token_ids: Sequence[int] = ()
    """Those of the computed tokens, at least."""
    rotate: Callable[[Tensor, int], Tensor] = lambda x, position: x
    """Rotates ``[..., head_dim]`` to a position."""


@dataclass(frozen=True)
class LaneChoice:
    """The positions that one lane kept, ascending, and how far from another choice that was.

    ``margin`` is the score of the worst token that is kept less that of the best one that is not, of those tokens that
    the rule left to the score: infinite where there are no two such. Where the rule compares something before, the
    smaller one of both: see its function. ``score`` is the worst kept one's. Rounding is relative to that, or to
    ``unit`` where it is larger.
    """

    kept: tuple[int, ...]
    margin: float
    score: float
    unit: float = 0.0

    def is_near_tie(self, tolerance: float) -> bool:
        """Whether what is compared need be off by no more than ``tolerance``, relative, for another choice."""
        return self.margin <= tolerance * max(abs(self.score), self.unit)


@dataclass(frozen=True)
class Eviction:
    """What was kept when ``computed`` tokens were computed, by (owner, KV head)."""

    computed: int
    lanes: Mapping[tuple[int, int], LaneChoice]


@dataclass(frozen=True)
class Trace:
    """Every eviction of a sequence, and the logits float64 ``[len(forced) + 1, vocab]`` of its last prompt token and of
    each forced one."""

    evictions: tuple[Eviction, ...]
    logits: Tensor

    def certain(self, tolerance: float) -> tuple[Eviction, ...]:
        """Return the evictions before the first that has a near-tie: what is computed in another precision agrees on
        these. After it, the sequences are no longer the same."""
        ties = (any(choice.is_near_tie(tolerance) for choice in e.lanes.values()) for e in self.evictions)
        return self.evictions[: next((i for i, is_tie in enumerate(ties) if is_tie), len(self.evictions))]
