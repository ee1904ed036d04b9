"""Evicts tokens in the pools of all owners."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from kvforge.kv_policies.eviction.calendar import Calendar
from kvforge.kv_policies.eviction.observation import Statistic
from kvforge.kv_policies.eviction.slots import Slots
from kvforge.kv_policies.state import EngineMemory, StatePool
from kvforge.kv_policies.transition import Transition
from model_defs.cache_access import copy_pages, evict, read_keys, read_values
from model_defs.kv_layout import first_page


class Rule(Protocol):
    """What is asked of an ``Eviction``; see there."""

    @property
    def calendar(self) -> Calendar: ...

    @property
    def statistic(self) -> Statistic | None: ...

    @property
    def is_by_sequence(self) -> bool: ...

    @property
    def owners_share(self) -> bool: ...

    def score(self, slots: Slots) -> Tensor: ...

    @property
    def named_pools(self) -> tuple[StatePool, ...]: ...


@dataclass(frozen=True)
class Places:
    """Where the ``length`` tokens of S sequences are before an eviction that leaves ``keep`` of them. The first
    ``sealed`` lie as one before left them; the others are consecutive.

    ``page_table`` and ``state_table`` are int32 ``[S, M]``, ``computed`` and ``prompt`` tokens int64 ``[S]``.
    """

    transitions: Sequence[Transition]
    page_size: int
    keep: int
    sealed: int
    length: int
    page_table: Tensor
    state_table: Tensor
    computed: Tensor
    prompt: Tensor

    @cached_property
    def index(self) -> Tensor:
        """``[L]`` int64"""
        return torch.arange(self.length, device=self.computed.device)

    @property
    def shift(self) -> Tensor:
        """``[S]``: of a token that is not sealed, its position less its index."""
        return self.computed - self.length

    @property
    def place(self) -> Tensor:
        """``[L]``: of a token in its page."""
        return self.index % self.page_size

    @cached_property
    def pages(self) -> Tensor:
        """``[S, L]`` int64: the page of a token."""
        return self.page_table.long()[:, self.index // self.page_size]

    @cached_property
    def state_rows(self) -> Tensor:
        """``[S, L]`` int64: the state page of a token."""
        return self.state_table.long()[:, self.index // self.page_size]

    @cached_property
    def numbers(self) -> tuple[Tensor, ...]:
        """As ``model_defs.cache_access.evict`` takes them."""
        fixed = [torch.full_like(self.computed, n, dtype=torch.int32) for n in (self.keep, self.length, self.sealed)]
        return (*fixed, self.shift.int(), self.page_table, self.state_table)


class EvictionState:
    """Carries out evictions: a rule's score for each owner, then the operator that moves what stays together."""

    def __init__(self, rule: Rule, memory: EngineMemory) -> None:
        self._rule = rule
        self._statistics = () if rule.statistic is None else rule.statistic.pool_names
        num_state_pools = len(rule.named_pools)
        self._caches = [pool[: len(pool) - num_state_pools] for pool in memory.pools]
        self._states = [pool[len(pool) - num_state_pools :] for pool in memory.pools]
        self._scales, self._rope_tables = memory.kv_scales, memory.rope_tables
        self._token_ids = {
            "special": torch.tensor(memory.special_tokens, dtype=torch.int32),
            "punctuation": torch.tensor(memory.punctuation_tokens, dtype=torch.int32),
        }
        self._device, self._page_size = memory.pools[0][0].device, memory.pools[0][0].shape[1]
        self._num_evictions = self._num_evicted = 0

    def counters(self) -> dict[str, int]:
        return {"evictions": self._num_evictions, "evicted_tokens": self._num_evicted}

    @torch.inference_mode()
    def apply(self, transitions: Sequence[Transition]) -> None:
        """Evict tokens of sequences. None of the pages that one gives up is another's in this step's transitions."""
        self._copy_pages(transitions)
        for _, alike in groupby(sorted(transitions, key=self._shape), key=self._shape):
            batch = list(alike)
            size = 1 if self._rule.is_by_sequence else len(batch)
            for start in range(0, len(batch), size):
                self._evict(batch[start : start + size])

    def _shape(self, transition: Transition) -> tuple[int, int]:
        """Tokens that were placed by an eviction before, and all in the cache."""
        sequence, calendar = transition.sequence, self._rule.calendar
        lengths = sequence.num_prompt_tokens, sequence.num_computed
        is_first = calendar.previous(*lengths) is None
        return 0 if is_first else calendar.kept, calendar.cached_before(*lengths)

    def _copy_pages(self, transitions: Sequence[Transition]) -> None:
        """Fill pages that a sequence takes in the place of those that others hold too."""
        pairs = [
            (old, new)
            for transition in transitions
            for old, new in zip(transition.old_pages, self._kept_pages(transition), strict=False)
            if old != new
        ]
        if pairs:
            old, new = torch.tensor(pairs, device=self._device).T
            for owner, cache in enumerate(self._caches):
                first = self._first_page(owner)
                copy_pages(cache, old + first, new + first)

    def _kept_pages(self, transition: Transition) -> list[int]:
        return transition.sequence.pages[: -(-self._rule.calendar.kept // self._page_size)]

    def _evict(self, transitions: Sequence[Transition]) -> None:
        """Evict from sequences of the same shape."""
        places = self._places(transitions)
        for owner in range(len(self._caches)):
            score = self._rule.score(self._slots(owner, places)).contiguous()
            position, *more = self._states[owner]
            evict(self._caches[owner], score, places.numbers, position, more[: len(self._statistics)])
        self._count(places)

    def _count(self, places: "Places") -> None:
        self._num_evictions += len(places.transitions)
        self._num_evicted += len(places.transitions) * (places.length - self._rule.calendar.kept)

    def _places(self, transitions: Sequence[Transition]) -> "Places":
        """Return where the tokens of sequences of the same shape are."""
        sealed, length = self._shape(transitions[0])
        num_pages, device = -(-length // self._page_size), self._device
        tables = [
            [*kept, *one.old_pages[len(kept) : num_pages]] for one in transitions for kept in [self._kept_pages(one)]
        ]
        states = [one.sequence.state_pages[:num_pages] for one in transitions]
        page_table, state_table = (torch.tensor(x, dtype=torch.int32, device=device) for x in (tables, states))
        computed = torch.tensor([one.sequence.num_computed for one in transitions], device=device)
        prompt = torch.tensor([one.sequence.num_prompt_tokens for one in transitions], device=device)
        return Places(
            transitions,
            self._page_size,
            self._rule.calendar.kept,
            sealed,
            length,
            page_table,
            state_table,
            computed,
            prompt,
        )

    def _slots(self, owner: int, places: "Places") -> Slots:
        """Return what a score may look at in an owner."""
        position, *more = self._states[owner]
        rows, index = places.state_rows, places.index
        stored = position[rows, places.place].transpose(1, 2)
        text = index + places.shift[:, None, None]
        statistics = zip(self._statistics, more, strict=False)
        return Slots(
            position=torch.where(index < places.sealed, stored, text).float(),
            num_computed=places.computed[:, None, None].float(),
            num_prompt=places.prompt[:, None, None].float(),
            statistics={name: pool[rows, places.place].transpose(1, 2) for name, pool in statistics},
            read_keys=lambda: self._read(read_keys, owner, places, self._scales[owner][0]),
            read_values=lambda: self._read(read_values, owner, places, self._scales[owner][1]),
            read_notes=lambda name: self._notes(owner, name, places),
            read_rope=self._rope_tables,
            find_tokens=lambda position, kind: self._find_tokens(position, kind, places),
        )

    def _read(self, read: Callable[..., Tensor], owner: int, places: "Places", scale: float) -> Tensor:
        """Rotated keys or values ``[S, kv_heads, L, d]`` float32."""
        pages = places.pages + self._first_page(owner)
        return read(self._caches[owner], pages, places.place, scale).transpose(1, 2)

    def _notes(self, owner: int, name: str, places: "Places") -> Tensor:
        index = [pool.name for pool in self._rule.named_pools].index(name)
        return self._states[owner][index][[one.sequence.slot for one in places.transitions]]

    def _find_tokens(self, position: Tensor, kind: str, places: "Places") -> Tensor:
        """Whether the tokens at ``position`` ``[S, kv_heads, L]`` are of a kind."""
        sequences = [one.sequence for one in places.transitions]
        tokens = [torch.from_numpy(one.tokens[: one.num_computed]) for one in sequences]
        found = [torch.isin(ids, self._token_ids[kind]).to(self._device) for ids in tokens]
        return torch.stack([one[index.long()] for one, index in zip(found, position, strict=True)])

    def _first_page(self, owner: int) -> int:
        """Where an owner's pages begin in its pool."""
        return first_page(owner, len(self._caches[0][0]), len(self._caches)) if self._rule.owners_share else 0
